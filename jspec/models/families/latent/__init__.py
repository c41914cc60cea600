"""Target families with latent attention (MLA)."""
