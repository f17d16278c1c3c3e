"""The nouns: types, mesh and sharding rules, random streams, tree helpers. Imports nothing above."""
