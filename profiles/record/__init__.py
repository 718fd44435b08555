"""Values that cross a file or a user: read within bounds, checked, written whole.

Lives here: `reading` (regular files), `parsing` (JSON, TOML), `record` (checked values), `writing`.
Must not: know what any document means.
"""

from profiles.record.parsing import Limits, json_file, json_object, json_value, toml_table
from profiles.record.reading import open_regular, read_bytes, read_text
from profiles.record.record import Document, Record
from profiles.record.writing import require_writable, write_bytes, write_text

__all__ = [
    "Document",
    "Limits",
    "Record",
    "json_file",
    "json_object",
    "json_value",
    "open_regular",
    "read_bytes",
    "read_text",
    "require_writable",
    "toml_table",
    "write_bytes",
    "write_text",
]
