"""Logos for Prefect's catalogue of blocks: the ones that the Prefect UI already shows for the same services."""

from __future__ import annotations

from pydantic import HttpUrl

__all__ = ["AWS_LOGO", "AZURE_LOGO", "FILES_LOGO", "GCP_LOGO", "PREFECT_LOGO"]

_IMAGES = "https://cdn.sanity.io/images/3ugk85nk/production"
AWS_LOGO = HttpUrl(f"{_IMAGES}/d74b16fe84ce626345adf235a47008fea2869a60-225x225.png")
GCP_LOGO = HttpUrl(f"{_IMAGES}/10424e311932e31c477ac2b9ef3d53cefbaad708-250x250.png")
AZURE_LOGO = HttpUrl(f"{_IMAGES}/54e3fa7e00197a4fbd1d82ed62494cb58d08c96a-250x250.png")
FILES_LOGO = HttpUrl(
    "https://raw.githubusercontent.com/PrefectHQ/prefect/"
    "420d0d6a78bb6df1fc18bcf188fdad43c1d22ea9/assets/block-logos/filesystem.png"
)
PREFECT_LOGO = FILES_LOGO
