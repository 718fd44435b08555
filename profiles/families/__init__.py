"""Common Hugging Face models in closed form: a config.json to a profile, without torch."""

from profiles.families.profile import profile_from_config
from profiles.families.registry import family_of

__all__ = ["family_of", "profile_from_config"]
