"""Looking up variants by what they can do."""

from attune.models import VARIANTS
from attune.platform.core.settings import labels_utterances, variants_where


def test_variants_where_returns_names_in_the_order_of_the_registry():
    assert variants_where(lambda _: True) == list(VARIANTS)
    assert variants_where(lambda _: False) == []


def test_the_variant_that_labels_utterances():
    assert variants_where(labels_utterances) == ["intent-classifier"]
