"""The report: from logged records only, tables and plots of accuracy against FLOPs."""

from opd_jax.report.page import write

__all__ = ["write"]
