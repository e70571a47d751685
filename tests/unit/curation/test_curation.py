"""Subtitles into dialogs: lines, who says them, where dialogs end, what is left out and counted."""

import gzip
import json
from collections import Counter

import polars as pl
import pytest

from attune.platform.core.errors import DataError, UsageError
from attune.platform.curation import cleaning, curate, subtitles, turns
from attune.platform.curation.cleaning import LINE_STEPS, STEPS, Cleaning, select_cleaning_steps
from attune.platform.curation.subtitles import Line
from attune.platform.data.dataset_folder import (
    MANIFEST,
    read_dataset_manifest,
    read_dataset_samples,
)
from attune.platform.data.prepare import prepare
from attune.platform.services import cluster
from tests.commands import error_of, json_output
from tests.tasks import interrupted_after, run_in_process

SRT = """1
00:00:01,000 --> 00:00:02,500
- Where were you?
- At home, <i>all</i>
day long.

2
00:00:03,000 --> 00:00:04,000
Why do you ask?
3
00:00:20.500 --> 00:00:21.000
[door slams]
Good night.
"""


def seconds(value):
    minutes, rest = divmod(value, 60)
    return f"00:{int(minutes):02d}:{rest:06.3f}".replace(".", ",")


def opus(lines, words=False):
    """A file of OPUS with a `<time>` at each end that is known."""
    parts = []
    for number, (text, start, end) in enumerate(lines, start=1):
        content = " ".join(f"<w>{word}</w>" for word in text.split()) if words else text
        begin = f'<time id="T{number}S" value="{seconds(start)}" />' if start is not None else ""
        close = f'<time id="T{number}E" value="{seconds(end)}" />' if end is not None else ""
        parts.append(f'<s id="{number}">{begin}\n{content}\n{close}</s>')
    body = "\n".join(parts)
    return f'<?xml version="1.0" encoding="utf-8"?>\n<document id="1">{body}<meta/></document>'


def test_lines_of_opus(tmp_path):
    path = tmp_path / "raw.xml"
    path.write_text(opus([("Who &amp; why?", 1, None), ("Nobody.", None, 2.5), ("Oh.", 3, 4)]))
    assert subtitles.read_subtitles(path) == [
        Line(text="Who & why?", start=1.0),
        Line(text="Nobody.", end=2.5),
        Line(text="Oh.", start=3.0, end=4.0),
    ]
    packed = tmp_path / "words.xml.gz"
    packed.write_bytes(gzip.compress(opus([("I 'm here , isn 't it ?", 1, 2)], True).encode()))
    assert subtitles.read_subtitles(packed) == [
        Line(text="I'm here, isn't it?", start=1.0, end=2.0)
    ]


def test_a_sentence_over_several_subtitles_has_the_outer_times(tmp_path):
    path = tmp_path / "a.xml"
    marks = '<time id="T1E" value="00:00:02,000"/><time id="T2S" value="00:00:02,100"/>'
    path.write_text(opus([(f"I said {marks} no.", 1, 3)]))
    assert subtitles.read_subtitles(path) == [Line(text="I said no.", start=1.0, end=3.0)]


def test_lines_of_srt(tmp_path):
    path = tmp_path / "a.srt"
    path.write_bytes(SRT.replace("\n", "\r\n").encode("utf-8-sig"))
    assert subtitles.read_subtitles(path) == [
        Line(text="- Where were you?", start=1.0),
        Line(text="- At home, <i>all</i> day long.", end=2.5),
        Line(text="Why do you ask?", start=3.0, end=4.0),
        Line(text="[door slams] Good night.", start=20.5, end=21.0),
    ]
    path.write_bytes("1\n00:00:01,000 --> 00:00:02,000\nIt\x92s a café.\n".encode("latin-1"))
    assert subtitles.read_subtitles(path)[0].text == "It\u2019s a café."


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.xml", b"<document><s>Hello.</s>"),
        ("b.xml", b"<document></document>"),
        ("c.xml.gz", gzip.compress(opus([("Hi.", 1, 2)]).encode(), mtime=0)[:-9]),
        ("d.srt", b"This is no subtitle.\n"),
        ("e.srt", b""),
        ("f.xml", b'<?xml version="1.0" encoding="klingon"?><document/>'),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        subtitles.read_subtitles(tmp_path / name)


@pytest.mark.parametrize(
    ("step", "text", "left"),
    [
        ("markup", "<i>Why</i> {\\an8}not &amp; now?", "Why not & now?"),
        ("lyrics", "\u266a La la la \u266a", ""),
        ("lyrics", "# La la la #", ""),
        ("lyrics", "You are #1 here.", "You are #1 here."),
        ("credits", "Subtitles by explosiveskull", ""),
        ("credits", "Visit www.example.org for more", ""),
        ("credits", "I translated it for her.", "I translated it for her."),
        ("sounds", "[DOOR SLAMS] No! (sighs) *cough* Never.", "No! Never."),
        ("sounds", "No. [the rest is", "No."),
        ("speakers", "- MARY: No.", "No."),
        ("speakers", "MR. SMITH: No.", "No."),
        ("speakers", "\u2013 No.", "No."),
        ("speakers", "-- and then I left.", "-- and then I left."),
        ("speakers", "Listen: I left.", "Listen: I left."),
        ("spelling", "l'm sure lt was l, wasn\u2019t it\u2026", "I'm sure It was I, wasn't it..."),
        ("spelling", "All is well, l. 5.", "All is well, l. 5."),
    ],
)
def test_steps_of_lines(step, text, left):
    counts = Counter()
    assert Cleaning((step,), counts).line(text) == left
    assert counts[step] == (text != left)
    assert Cleaning((), counts).line(text) == text


@pytest.mark.parametrize(
    ("step", "good", "bad"),
    [
        ("short", "Oh.", "..."),
        ("long", "word " * 100, "word " * 101),
        ("letters", "No!", "1234 abc"),
    ],
)
def test_steps_of_turns(step, good, bad):
    counts = Counter()
    cleaned = Cleaning((step,), counts)
    assert cleaned.pieces([good, bad, good, good]) == [(0, 1), (2, 4)]
    assert counts == {step: 1}


def test_steps_of_dialogs():
    counts = Counter()
    steps = Cleaning(("english", "alone"), counts)
    assert steps.pieces(["What do you want from me now?", "I think you know it."]) == [(0, 2)]
    spanish = ["Qu\u00e9 quieres de m\u00ed ahora, hombre?", "Creo que ya lo sabes bien."]
    assert steps.pieces(spanish) == []
    german = ["Was willst du jetzt von mir, sag schon.", "Ich glaube, das wei\u00dft du genau."]
    assert steps.pieces(german) == []
    assert steps.pieces(["Nein!", "Nein!"]) == [(0, 2)]  # too few words to tell
    assert steps.pieces(["Alone here."]) == []
    assert counts == {"english": 2, "alone": 1}


def test_steps_are_selected_by_name():
    assert select_cleaning_steps(()) == STEPS
    assert set(STEPS) - set(select_cleaning_steps(["lyrics", "english"])) == {"lyrics", "english"}
    with pytest.raises(UsageError, match="did you mean 'lyrics'"):
        select_cleaning_steps(["lyric"])
    assert all(cleaning.__dict__[step].__doc__ for step in LINE_STEPS)


def test_features_of_two_lines():
    first = Line(text="Where were you?", start=1.0, end=2.0)
    values = turns.features(first, Line(text="i was at home", start=2.5, end=3.0), 0.7)
    assert {"end ?", "begin lower", "head i", "pair you i", "people you i", "2 home"} <= set(values)
    later = turns.features(first, Line(text="i was at home", start=9.5), 0.7)
    unknown = turns.features(first, Line(text="i was at home"), 0.7)
    assert values["gap"] < later["gap"]
    assert unknown["gap"] == 0.7
    assert {name for name in values if values[name] != unknown[name]} == {"gap"}


QUESTIONS = ("Where were you?", "What is it?", "Why not?", "Who said so?")
ANSWERS = ("At home, as always.", "Nothing at all.", "Because I say so.", "Nobody did.")


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Conversations in which whoever asks is answered, and whoever answers goes on."""
    lines = []
    for number in range(60):
        asked, answered = QUESTIONS[number % 4], ANSWERS[number % 3]
        turns = [("A", asked), ("B", answered), ("B", "And I went on."), ("A", asked)]
        utterances = [
            {"role": "speaker", "speaker": who, "text": text, "start": 2.0 * place,
             "end": 2.0 * place + 1.9}
            for place, (who, text) in enumerate(turns)
        ]  # fmt: skip
        lines.append(json.dumps({"id": f"c{number}", "episode": f"e{number % 20}",
                                 "utterances": utterances}))  # fmt: skip
    path = tmp_path_factory.mktemp("known") / "known.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def classifier(known, tmp_path_factory):
    path = tmp_path_factory.mktemp("turns") / "turns.json"
    turns.train(str(known), lines="utterances").save(path)
    return path


def test_turn_classifier_is_trained(known, classifier):
    model = turns.load_turns_model(classifier)
    report = model.report
    assert report["accuracy"] == 1.0
    assert report["balanced_accuracy"] == report["f1_same"] == 1.0
    always = {"accuracy": pytest.approx(2 / 3), "balanced_accuracy": 0.5, "f1_same": 0.0}
    assert report["always_changed"] == always
    assert report["published"] == 0.7669
    assert sum(report["pairs"].values()) == 180
    assert model.changes(Line(text="Why not?"), Line(text="Nobody did."))
    assert not model.changes(Line(text="Nobody did."), Line(text="And I went on."))
    assert turns.train(str(known), lines="utterances") == model  # the same seed, the same weights


def test_scores_of_a_classifier():
    pair = (Line(text="a"), Line(text="b"))
    truth = turns.LabelledPairs(pairs=[pair] * 5, changes=[True, True, True, False, False])
    metrics = turns.scores([True, True, False, False, True], truth)
    expected = {"accuracy": 3 / 5, "balanced_accuracy": (2 / 3 + 1 / 2) / 2, "f1_same": 1 / 2}
    assert metrics == pytest.approx(expected)


def test_no_episode_is_in_two_splits(known):
    splits = turns._read_turn_pairs(str(known), "auto", "utterances")
    texts = {split: {pair[0].text for pair in one.pairs} for split, one in splits.items()}
    assert all(texts.values())
    assert sum(len(one.pairs) for one in splits.values()) == 180
    sizes = {split: len(one.pairs) for split, one in splits.items()}
    assert all(size % 9 == 0 for size in sizes.values())  # an episode is three conversations


def test_sentences_inside_a_turn_have_the_same_speaker_and_no_times(tmp_path):
    texts = {"A": "I\u2019m here. Who is it?", "B": "Me."}
    utterances = [
        {
            "role": "speaker",
            "speaker": who,
            "text": text,
            "start": 2 * place + 1,
            "end": 2 * place + 2,
        }
        for place, (who, text) in enumerate(texts.items())
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "a", "utterances": utterances}))
    with pytest.raises(UsageError, match="too few lines with known speakers for valid"):
        turns.train(str(tmp_path / "a.jsonl"))
    frame = pl.concat(turns.Source(str(tmp_path / "a.jsonl")).read(Counter()))
    lines = list(turns._split_turns_into_lines(frame, "sentences"))
    assert lines == [
        (Line(text="I'm here.", start=1.0), "A"),
        (Line(text="Who is it?", end=2.0), "A"),
        (Line(text="Me.", start=3.0, end=4.0), "B"),
    ]


def test_files_that_are_no_turn_classifier_are_refused(tmp_path, known):
    with pytest.raises(UsageError, match="no such file"):
        turns.load_turns_model(tmp_path / "absent.json")
    (tmp_path / "other.json").write_text('{"format": "x"}')
    with pytest.raises(DataError, match="is not a turn classifier"):
        turns.load_turns_model(tmp_path / "other.json")
    with pytest.raises(UsageError, match="--lines: expected sentences or utterances, got 'words'"):
        turns.train(str(known), lines="words")


def dialogs(lines, model=None, steps=(), gap=5.0):
    curated = curate.split_into_dialogs(lines, model, Cleaning(steps, Counter()), gap)
    return [[turn.text for turn in dialog] for dialog in curated]


def test_silence_ends_dialogues_and_missing_times_do_not():
    lines = [
        Line(text="One.", start=0.0, end=1.0),
        Line(text="Two.", start=6.0, end=7.0),  # exactly five seconds: not more
        Line(text="Three.", start=12.1, end=None),
        Line(text="Four.", start=99.0, end=100.0),
        Line(text="Five.", start=None, end=200.0),
        Line(text="Six.", start=206.0, end=None),
    ]
    assert dialogs(lines) == [["One.", "Two."], ["Three.", "Four.", "Five."], ["Six."]]
    assert dialogs(lines, gap=4.0)[0] == ["One."]


def test_dropped_lines_pass_on_their_times():
    lines = [
        Line(text="One.", start=0.0, end=None),
        Line(text="[laughs]", start=None, end=2.0),
        Line(text="Two.", start=9.0, end=10.0),
        Line(text="[door]", start=20.0, end=None),
        Line(text="[steps]", start=None, end=None),
        Line(text="Three.", start=None, end=21.0),
        Line(text="[music]", start=30.0, end=40.0),
        Line(text="Four.", start=None, end=None),  # shown with nothing that has a time
    ]
    assert dialogs(lines, steps=("sounds",)) == [["One."], ["Two."], ["Three.", "Four."]]


def test_lines_of_one_speaker_are_joined(classifier):
    lines = [
        Line(text="Why not?", start=0.0, end=1.9),
        Line(text="Nobody did.", start=2.0, end=3.9),
        Line(text="And I went on.", start=4.0, end=5.9),
        Line(text="[sighs]", start=6.0, end=7.0),
        Line(text="- And I went on.", start=8.0, end=9.0),
        Line(text="And I went on.", start=15.0, end=16.0),
    ]
    model = turns.load_turns_model(classifier)
    joined = list(curate.split_into_dialogs(lines, model, Cleaning(STEPS, Counter()), 5.0))
    assert [[turn.text for turn in dialog] for dialog in joined] == [
        ["Why not?", "Nobody did. And I went on.", "And I went on."],  # a dash begins a turn
        ["And I went on."],  # so does a silence
    ]
    assert (joined[0][1].start, joined[0][1].end) == (2.0, 5.9)


@pytest.fixture
def here(monkeypatch):
    """The files of the tasks, which run in this process on small shards."""
    monkeypatch.setattr(cluster, "connect", lambda: None)
    monkeypatch.setattr(curate, "FILES_OF_A_PART", 2)
    return run_in_process(monkeypatch)


TALK = [("Where were you?", 1, 2), ("At home, as always.", 2, 3), ("I was at home, too.", 3, 4)]


@pytest.fixture
def films(tmp_path):
    """Films as OPUS lays them out, with a damaged file and the same words in two films."""
    root = tmp_path / "films"
    for year, film, version, lines in (
        ("1999", "11", "1", [*TALK, ("What is it? [laughs]", 30, 31), ("Nothing.", 31, 32)]),
        ("1999", "11", "2", TALK),
        ("2001", "22", "1", [("Who said so?", 1, 2), ("...", 2, 3), ("Nobody.", 3, 4)]),
        ("2001", "33", "1", [("Why not, then?", 1, 2), ("Because I say so.", 2, 3)]),
    ):
        folder = root / year / film
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{version}.xml.gz").write_bytes(gzip.compress(opus(lines).encode()))
    (root / "2001" / "22" / "2.xml").write_text("<document><s>Hello")
    (root / "notes.txt").write_text("no subtitles")
    return root


@pytest.mark.usefixtures("here")
def test_films_give_dialogues(films, tmp_path):
    out = tmp_path / "out"
    manifest, speed = curate.curate([films], out, model=None)
    rows = pl.read_parquet(out / "dialogs.parquet")
    assert rows["conversation_id"].unique(maintain_order=True).to_list() == [
        "1999/11/1#0", "1999/11/1#1", "2001/33/1#0"
    ]  # fmt: skip
    assert rows["text"].to_list()[:5] == [*(text for text, *_ in TALK), "What is it?", "Nothing."]
    assert rows["role"].to_list()[:3] == ["speaker", "listener", "speaker"]
    assert rows.select("start", "end").row(1) == (2.0, 3.0)
    assert manifest["rejected"] == {
        "rows": 1, "file": "rejects.jsonl", "reasons": {"damaged file": 1}
    }  # fmt: skip
    [reject] = (out / "rejects.jsonl").read_text().splitlines()
    assert "2.xml: not readable as XML" in json.loads(reject)["problem"]
    assert manifest["steps"] == {
        **dict.fromkeys(STEPS, 0), "sounds": 1, "short": 1, "alone": 2, "duplicates": 1
    }  # fmt: skip
    assert manifest["lines"] == 13
    before, after = manifest["statistics"]["cut"], manifest["statistics"]["cleaned"]
    assert (before["dialogs"], before["turns"]) == (5, 13)
    assert (after["dialogs"], after["turns"]) == (3, 7)
    assert after["tokens"] == sum(map(cleaning.count_tokens_for_cleaning, rows["text"]))
    assert after["tokens_per_dialog"] == pytest.approx(after["tokens"] / 3)
    assert speed["lines_per_second_per_core"] > 0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    again, unknown = curate.curate([films], out, model=None)
    assert again == manifest
    assert unknown is None


@pytest.mark.usefixtures("here")
def test_prepare_reads_what_is_curated(films, tmp_path):
    curate.curate([films], tmp_path / "out", model=None)
    manifest = prepare(str(tmp_path / "out"), tmp_path / "data")
    assert (manifest["format"], manifest["rejected"]["rows"]) == ("dialogues", 0)
    samples = pl.concat(
        [read_dataset_samples(tmp_path / "data", s) for s in ("train", "valid", "test")]
    )
    contexts = dict(samples.select("response", "context").iter_rows())
    assert contexts == {
        "At home, as always.": ["Where were you?"],
        "Nothing.": ["What is it?"],
        "Because I say so.": ["Why not, then?"],
    }


@pytest.mark.usefixtures("here")
def test_a_film_belongs_to_one_split(tmp_path):
    for film in range(12):
        (tmp_path / "films" / str(film)).mkdir(parents=True)
        for version in range(2):
            lines = [(f"{text} Number {film} {version}.", *times) for text, *times in TALK]
            path = tmp_path / "films" / str(film) / f"{version}.xml"
            path.write_text(opus(lines))
    curate.curate([tmp_path / "films"], tmp_path / "out", model=None)
    rows = pl.read_parquet(tmp_path / "out" / "dialogs.parquet")
    film = pl.col("conversation_id").str.split("/").list.first()
    splits = rows.group_by(film.alias("film")).agg(pl.col("split").n_unique())
    assert splits["split"].to_list() == [1] * 12
    assert rows["split"].n_unique() > 1


@pytest.mark.usefixtures("here")
def test_steps_can_be_left_out(films, tmp_path):
    kept, _ = curate.curate([films], tmp_path / "a", model=None, without=["duplicates", "sounds"])
    rows = pl.read_parquet(tmp_path / "a" / "dialogs.parquet")
    assert "1999/11/2#0" in rows["conversation_id"].to_list()
    assert "What is it? [laughs]" in rows["text"].to_list()
    assert not {"duplicates", "sounds"} & set(kept["steps"])
    every, _ = curate.curate([films], tmp_path / "b", model=None, without=STEPS)
    assert every["statistics"]["cut"] == every["statistics"]["cleaned"]
    assert (every["statistics"]["cleaned"]["dialogs"], every["steps"]) == (5, {})


def test_an_interrupted_curation_is_resumed(films, here, tmp_path):
    whole, _ = curate.curate([films], tmp_path / "whole", model=None)
    parts = len(here)
    assert parts == 3
    out = tmp_path / "out"
    with interrupted_after(1):
        curate.curate([films], out, model=None)
    assert not out.exists()
    del here[:]
    counts, totals = [], []
    resumed, _ = curate.curate(
        [films], out, model=None, total=totals.append, progress=counts.append
    )
    assert len(here) == parts - 1  # what was done is not done again
    assert (sum(counts), totals) == (5, [5])
    assert resumed["contents"] == whole["contents"]  # to the byte


@pytest.mark.usefixtures("here")
def test_wrong_sources_of_subtitles_are_named(films, tmp_path):
    with pytest.raises(UsageError, match="no such source"):
        curate.curate([tmp_path / "absent"], tmp_path / "out", model=None)
    with pytest.raises(UsageError, match=r"no subtitles in .*notes.txt"):
        curate.curate([films / "notes.txt"], tmp_path / "out", model=None)
    with pytest.raises(UsageError, match=r"two files are named '1999/11/1'"):
        curate.curate([films, films], tmp_path / "out", model=None)
    with pytest.raises(UsageError, match="--gap: expected a number of seconds above 0, got 0"):
        curate.curate([films], tmp_path / "out", model=None, gap=0)
    with pytest.raises(DataError, match=r"no dialogue is left of 1 files .*not readable as XML"):
        curate.curate([films / "2001" / "22" / "2.xml"], tmp_path / "out", model=None)
    curate.curate([films], tmp_path / "out", model=None)
    with pytest.raises(UsageError, match="made in another way"):
        curate.curate([films], tmp_path / "out", model=None, gap=3)


@pytest.mark.usefixtures("here")
def test_the_commands(call, known, films, tmp_path):
    report = json_output(
        call(
            "data", "turns", "--source", known, "--out", "t.json", "--lines", "utterances", "--json"
        )
    )
    assert (report["accuracy"], report["lines"]) == (1.0, "utterances")
    command = ("data", "curate", "--source", films, "--turns", "t.json", "--out", "out")
    done = json_output(call(*command, "--without", "lyrics", "--json"))
    assert done["files"] == 5
    assert done["rejected"]["file"] == "out/rejects.jsonl"
    assert done["hash"] == read_dataset_manifest(tmp_path / "out")["hash"]
    assert done["speed"]["lines_per_second"] > 0
    shown = call(*command, "--without", "lyrics").stdout
    assert "rejected: 1 damaged files" in shown
    assert "tokens per dialog" in shown
    assert "did you mean 'lyrics'" in error_of(call(*command, "--without", "lyric"))
    assert "no such file" in error_of(call(*command[:-4], "--turns", "x", "--out", "y"))
    refusal = error_of(call("train", "dummy", "--data", "out"))
    assert "contains no pairs (curation)" in refusal
    assert (tmp_path / "out" / MANIFEST).is_file()
