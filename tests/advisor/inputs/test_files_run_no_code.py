"""A factory is code: it is run where the user names it, not where a file does."""

from __future__ import annotations

import pytest

from advisor.inputs.models import profile_of_factory
from profiles.errors import ModelError
from tests.factories import chain


def test_a_factory_that_only_a_saved_profile_names_is_not_imported() -> None:
    with pytest.raises(ModelError, match="`no_such_module:build` is named in a file"):
        profile_of_factory("no_such_module:build", like=chain(), sequence_length=8)
