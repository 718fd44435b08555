"""Common Hugging Face models in closed form: a config.json to a profile, without torch."""

from profiles.closed_forms.families.profile import profile_from_config
from profiles.closed_forms.families.registry import family_of

__all__ = ["family_of", "profile_from_config"]
