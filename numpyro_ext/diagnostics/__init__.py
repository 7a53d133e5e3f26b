"""Room: diagnostics."""

from numpyro_ext.diagnostics.evidence import EvidenceBounds, evidence_bounds

__all__ = ["EvidenceBounds", "evidence_bounds"]
