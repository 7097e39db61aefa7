"""The laws have the profiles and the fixtures of the other tests."""

from tests.conftest import isolated as isolated
from tests.conftest import (
    pytest_collection_modifyitems as pytest_collection_modifyitems,
)
