"""Commands beside training: estimates, the failure model, reports."""
