"""The bundled corpus is worth learning on, and nothing leaks from train into what is held out."""

import re
from collections import Counter
from itertools import combinations

import polars as pl
import pytest
import yaml
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import MultinomialNB

from attune.platform.data import bundled
from attune.platform.data.bundled import generator
from attune.platform.data.conversations import LISTENER, SPLITS, UNPAIRED
from attune.platform.data.labels import EMOTIONS, INTENTS, LABELS
from attune.platform.data.samples import build_samples, tokenize_conversations

# How people say an emotion's name: `proud` is also named by `pride`.
NAMES = dict.fromkeys(EMOTIONS, "") | {
    "angry": "anger|angri", "annoyed": "annoy", "anxious": "anxiet", "ashamed": "shame",
    "confident": "confiden", "devastated": "devastat", "disappointed": "disappoint",
    "disgusted": "disgust", "embarrassed": "embarrass", "excited": "excit", "faithful": "faith",
    "furious": "fury", "grateful": "gratitude", "guilty": "guilt", "hopeful": "hope",
    "impressed": "impress", "joyful": "joy", "lonely": "lonel", "nostalgic": "nostalg",
    "prepared": "prepar", "proud": "pride", "sentimental": "sentiment", "surprised": "surpris",
    "terrified": "terrif|terror", "trusting": "trust",
}  # fmt: skip


@pytest.fixture(scope="module")
def conversations():
    return pl.concat(bundled.read())


@pytest.fixture(scope="module")
def bundled_samples(conversations):
    return build_samples(tokenize_conversations(conversations))


def texts(conversations, split):
    return set(conversations.filter(pl.col("split") == split)["text"])


def test_size_and_emotions(conversations):
    paired = conversations.filter(pl.col("split").is_in(SPLITS))
    assert paired["conversation_id"].n_unique() >= 1500
    for split in (*SPLITS, *UNPAIRED):
        assert set(conversations.filter(pl.col("split") == split)["emotion"]) == set(EMOTIONS)


def test_no_conversation_twice_and_no_sentence_twice_in_one(conversations):
    whole = conversations.group_by("conversation_id", maintain_order=True).agg("text")
    assert whole["text"].list.join("|").n_unique() == whole.height
    for text in whole["text"].list.join(" "):
        sentences = re.split(r"(?<=[.?!]) ", text)
        assert len(set(sentences)) == len(sentences), text


def test_everything_is_annotated(conversations):
    assert set(conversations["label"]) == set(LABELS)
    listener = conversations.filter(pl.col("role") == LISTENER)
    assert set(listener["label"]) == {*INTENTS, "neutral"}
    assert conversations["situation"].null_count() == 0
    paired = conversations.filter(pl.col("split") != UNPAIRED[1])
    causes = paired.group_by("conversation_id").agg(pl.col("cause").sum())
    assert set(causes["cause"]) == {1}
    marked = set(conversations.filter("cause")["role"])
    assert marked == {"speaker"}


def test_splits_are_by_material(conversations):
    """Situations, causes, questions, answers and replies of held-out splits are new."""
    for emotion in EMOTIONS:
        material = generator._load_material(emotion)["situations"]
        by_split: dict[str, set[str]] = {}
        for place, situation in enumerate(material):
            content = [situation["summary"], situation["hook"], *situation["causes"]]
            content += [text for asked in situation["asked"] for text in asked.values()]
            content += [reply["text"] for reply in situation["replies"]]
            by_split.setdefault(generator.SITUATION_SPLITS[place], set()).update(content)
        for one, other in combinations(by_split.values(), 2):
            assert not one & other
    frames = Counter(generator.FRAME_SPLITS)
    assert frames == {"train": 6, "valid": 2, "test": 2}
    for split in ("valid", "test"):
        answers = conversations.filter((pl.col("split") == split) & (pl.col("role") == LISTENER))
        shared = set(answers["text"]) & texts(conversations, "train")
        assert len(shared) <= 0.05 * answers.height


def test_few_test_answers_occur_in_train(bundled_samples):
    train = set(bundled_samples.filter(pl.col("split") == "train")["response"])
    test = bundled_samples.filter(pl.col("split") == "test")["response"]
    share = sum(answer in train for answer in test) / len(test)
    print(f"\ntest answers that occur in train: {share:.1%}")
    assert share <= 0.2


def test_most_conversations_do_not_name_their_emotion(conversations):
    whole = conversations.group_by("conversation_id").agg("text", pl.col("emotion").first())
    named = sum(
        bool(re.search(rf"\b(?:{emotion}|{NAMES[emotion] or emotion})", " ".join(text).lower()))
        for text, emotion in whole.select("text", "emotion").iter_rows()
    )
    print(f"\nconversations that name their emotion: {named / whole.height:.1%}")
    assert named / whole.height < 0.3


def test_bag_of_words_learns_something_but_not_all(bundled_samples):
    def read(split):
        rows = bundled_samples.filter(pl.col("split") == split)
        return rows["context_tokens"].list.join(" ").to_list(), rows["emotion"].to_list()

    words = CountVectorizer(token_pattern=r"\S+")
    contexts, emotions = read("train")
    counts = words.fit_transform(contexts)
    held_out, truth = read("test")
    for classifier in (MultinomialNB(), LogisticRegression(max_iter=500)):
        accuracy = classifier.fit(counts, emotions).score(words.transform(held_out), truth)
        print(f"\nbag of words, {type(classifier).__name__}: {accuracy:.1%} of the test emotions")
        assert 0.25 < accuracy < 0.9  # chance is 3.1 %


def test_unpaired_text_has_no_other_half(bundled_samples):
    contexts = bundled_samples.filter(pl.col("split") == UNPAIRED[0])
    responses = bundled_samples.filter(pl.col("split") == UNPAIRED[1])
    assert contexts["response"].null_count() == contexts.height >= 150
    assert set(responses["context"].list.len()) == {0}
    assert responses.height >= 200
    assert not set(contexts["situation"]) & set(responses["situation"])
    assert set(contexts["context_roles"].list.last()) == {"speaker"}


def test_lexicon_words_occur_and_are_valued(conversations):
    lexicon = bundled.lexicon()
    words = set(re.findall(r"[a-z']+", " ".join(conversations["text"]).lower()))
    assert len(lexicon.words & words) > 0.9 * len(lexicon.words) > 300
    assert not lexicon.words & set(EMOTIONS)
    assert all(0 <= v <= 1 and 0 <= a <= 1 for v, a in lexicon.valence_arousal.values())


def test_material_has_its_form():
    for emotion in EMOTIONS:
        material = generator._load_material(emotion)
        sizes = {name: len(material[name]) for name in material}
        assert sizes == {
            "situations": 32, "feelings": 8, "names": 2, "closings": 6, "lexicon": 24,
        }  # fmt: skip
        for closing in material["closings"]:
            assert closing["label"] in LABELS
        assert yaml.safe_dump(material).isascii()
