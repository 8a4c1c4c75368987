"""The minimum versions exclude releases with known vulnerabilities; `make audit` asks for all."""

from importlib import metadata

import pytest
from packaging.requirements import Requirement

# The last release with a vulnerability that concerns tftpu.
VULNERABLE = {
    "google-cloud-aiplatform": ("1.132.0", "CVE-2026-2473"),
    "keras": ("3.13.1", "CVE-2026-1669"),
    "pillow": ("12.2.0", "CVE-2026-59199"),
    "pyyaml": ("5.3.1", "CVE-2020-14343"),
    "scikit-learn": ("1.4.2", "CVE-2024-5206"),
    "setuptools": ("78.1.0", "CVE-2025-47273"),
}


@pytest.mark.parametrize("package", VULNERABLE)
def test_a_vulnerable_release_is_not_installed(package):
    release, name = VULNERABLE[package]
    wanted = [Requirement(line) for line in metadata.requires("tftpu")]
    found = [one.specifier for one in wanted if one.name.lower() == package]
    assert found
    for specifier in found:
        assert not specifier.contains(release), name
        assert specifier.contains(metadata.version(package))
