"""`needs_assets` marks a test that uses the demo's model or texts; it is skipped, with a reason, without them."""

import pytest

from tools.demo_assets import ASSETS, AssetError, asset


def why_missing() -> str:
    try:
        for name in ASSETS:
            asset(name)
    except AssetError as error:
        return str(error)
    return ""


def needs_assets(test):
    return pytest.mark.assets(pytest.mark.skipif(bool(why_missing()), reason=why_missing())(test))
