"""The nouns: types, mesh and sharding rules, random streams, trees. Imports nothing above."""
