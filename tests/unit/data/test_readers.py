"""Every format into the one frame; every kind of bad file named with its row and the fix."""

import gzip
import json
from collections import Counter

import polars as pl
import pytest

from attune.platform.core.errors import DataError, UsageError
from attune.platform.data import files
from attune.platform.data.conversations import (
    CONVERSATIONS,
    IN_REJECTED_CONVERSATION,
    Checker,
    conversation_problem_kind,
    separate_rejected_conversations,
    whole_conversations,
)
from attune.platform.data.readers.edos import detokenize_edos_column
from attune.platform.data.sources import Source

ED_HEADER = "conv_id,utterance_idx,context,prompt,speaker_idx,utterance,selfeval,tags\n"
ED = ED_HEADER + (
    'c:0,1,sad,My dog_comma_ Rex_comma_ left.,7,He "ran" away_comma_ I cried.,5|5,\n'
    "c:0,2,sad,My dog_comma_ Rex_comma_ left.,9,Oh no!,5|5,\n"
    "c:1,1,proud,I won.,7,I won_comma_ at last.,,,candidate one|candidate two\n"
    "c:1,2,proud,I won.,9,Well done!\n"
)


def read(path, form="auto", tolerated=None):
    source = Source(str(path), form)
    frames = list(source.read(Counter() if tolerated is None else tolerated))
    return pl.concat(frames)


def judged(path, form="auto", **options):
    frame = Checker(Source(str(path), form).reader.EMOTION_LABELS, **options).check(
        read(path, form)
    )
    return separate_rejected_conversations(frame)


@pytest.fixture
def ed(tmp_path):
    (tmp_path / "train.csv").write_text(ED)
    return tmp_path / "train.csv"


def test_empathetic_dialogues(ed):
    tolerated = Counter()
    frame = read(ed, tolerated=tolerated)
    assert frame.schema == CONVERSATIONS
    assert frame["text"].to_list()[:2] == ['He "ran" away, I cried.', "Oh no!"]
    assert frame["situation"][0] == "My dog, Rex, left."
    assert frame["role"].to_list() == ["speaker", "listener"] * 2
    assert frame["turn"].to_list() == [0, 1, 0, 1]
    assert frame["split"].unique().to_list() == ["train"]
    assert tolerated == {"ragged rows": 2}
    assert frame["problem"].null_count() == 4


def test_edos(tmp_path):
    (tmp_path / "mturk.csv").write_text(
        "Count,Index,DialogID,Dialog,Agreed emotion (2/3 vote),W1\n"
        "1,0,7,\"Stop it , isn 't it odd ?\nI 'm off .\",Angry,Angry\n"
        '2,0,8,"One line only",-,Sad\n'
        '3,0,9,"Who ?",Disagreeing (other),Sad\n'
        '4,0,10,"Who ?",Questioning,Sad\n'
    )
    (tmp_path / "self.csv").write_text(
        ',os_dialog_id,emotion,confidence,os_dialog\n1,5,afraid,.9,"- - Run !\n- Why ?"\n'
    )
    tolerated = Counter()
    frame = read(tmp_path, tolerated=tolerated)
    assert frame["text"].to_list()[:2] == ["Stop it, isn't it odd?", "I'm off."]
    assert frame["emotion"].to_list()[:3] == ["angry", "angry", None]
    assert frame["label"].to_list()[:2] == [None, "angry"]
    assert frame.filter(pl.col("label") == "questioning")["emotion"].to_list() == [None]
    assert frame.filter(pl.col("file") == "self.csv")["text"].to_list() == ["Run!", "Why?"]
    assert tolerated == {"dialogs without a majority label": 1}
    assert conversation_problem_kind(frame["problem"].drop_nulls()[0]) == "unknown label"


def test_detokenized_text():
    frame = pl.DataFrame({"t": ["I 'm sure you don 't , he 's 5 'clock ... do n't !"]})
    assert frame.select(detokenize_edos_column(pl.col("t"))).item() == (
        "I'm sure you don't, he's 5 'clock... don't!"
    )


def test_reccon(tmp_path):
    turn = {"speaker": "B", "utterance": "Good , I 'm glad .", "emotion": "happines"}
    dialogue = [
        {"turn": 1, "speaker": "B", "utterance": "Hi .", "emotion": "neutral"},
        {**turn, "turn": 2, "speaker": "A", "expanded emotion cause evidence": [1, 2, "b"]},
        {**turn, "turn": 3},
    ]
    (tmp_path / "dailydialog_valid.json").write_text(json.dumps({"va_1": [dialogue]}, indent=1))
    tolerated = Counter()
    frame = read(tmp_path, tolerated=tolerated)
    assert frame["role"].to_list() == ["speaker", "listener", "speaker"]
    assert frame["label"].to_list() == ["neutral", "happiness", "happiness"]
    assert frame["evidence"].to_list() == [None, [0, 1], None]
    assert frame["text"][1] == "Good, I'm glad."
    assert frame["split"][0] == "valid"
    assert tolerated == {"misspelt labels": 2}


MELD_HEADER = (
    "Sr No.,Utterance,Speaker,Emotion,Sentiment,Dialogue_ID,Utterance_ID,Season,Episode,"
    "StartTime,EndTime\n"
)


def test_meld(tmp_path):
    (tmp_path / "dev.csv").write_text(
        MELD_HEADER + '1,"Oh, no.",Ann,sadness,negative,0,0,4,7,"00:20:57,256","00:21:00,049"\n'
        '2,What?,Bob,surprise,negative,0,2,4,7,"0:21:01,927","0:21:03,261"\n'
        "3,So.,Ann,neutral,neutral,0,3,4,7,soon,later\n"
        '4,Hi.,Cid,joy,positive,1,0,4,7,"0:21:01,927","0:21:03,261"\n'
    )
    tolerated = Counter()
    frame = read(tmp_path, tolerated=tolerated)
    assert frame["role"].to_list()[:2] == ["speaker", "listener"]
    assert frame["start"][0] == pytest.approx(20 * 60 + 57.256)
    assert frame["episode"][0] == "s04e07"
    assert frame["split"][0] == "valid"
    assert tolerated == {"dialogues with a missing line": 1}
    assert frame["problem"][2] == "not a time: expected H:MM:SS,mmm, got 'soon'"


CONVERSATION = {
    "id": "a1",
    "emotion": "sad",
    "situation": "A loss.",
    "split": "test",
    "utterances": [
        {"role": "speaker", "text": "It is gone.", "label": "sad", "cause": True},
        {"role": "listener", "text": "I am sorry.", "label": "sympathizing", "cause": False},
    ],
}


def as_rows():
    return [
        {
            "conversation_id": "a1",
            "turn": turn,
            **{key: CONVERSATION[key] for key in ("emotion", "situation", "split")},
            **utterance,
        }
        for turn, utterance in enumerate(CONVERSATION["utterances"])
    ]


def test_empathetic_intents(tmp_path):
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.txt").write_text(
            "17 <SEP> i feel thankful\n38 <SEP> Why, a <SEP> b?\n\n40 <SEP> ok\n41 <SEP> no\nno\n"
        )
    (tmp_path / "labels.txt").write_text("afraid,0\n")
    (tmp_path / "utterance_labels.csv").write_text("split,conv_id,label\ntrain,a,sad\n")
    assert Source(str(tmp_path)).source_file_sizes.keys() == {"train.txt", "valid.txt", "test.txt"}
    usable, bad = judged(tmp_path / "train.txt", splits=["labelled_train"])
    assert usable.select("emotion", "label", "role", "text", "turn").rows() == [
        ("grateful", "grateful", "speaker", "i feel thankful", 0),
        ("questioning", "questioning", "listener", "Why, a <SEP> b?", 0),
        ("neutral", "neutral", "listener", "ok", 0),
    ]
    assert bad.select("row", pl.col("problem").str.slice(0, 18)).rows() == [
        (5, "unknown label '41'"),
        (6, "no separator: a li"),
    ]
    (tmp_path / "mine.txt").write_text("1 <SEP> x\n")
    raises(UsageError, tmp_path / "mine.txt", "auto", "no known format")


def test_own_dialogues_in_three_forms_are_the_same(tmp_path):
    (tmp_path / "own.jsonl").write_text(json.dumps(CONVERSATION) + "\n")
    pl.DataFrame(as_rows()).write_csv(tmp_path / "own.csv")
    pl.DataFrame(as_rows()).write_parquet(tmp_path / "own.parquet")
    frames = [read(tmp_path / name) for name in ("own.jsonl", "own.csv", "own.parquet")]
    expected = {**as_rows()[1], "problem": None}
    for frame in frames:
        assert {key: frame.to_dicts()[1][key] for key in expected} == expected


def test_optional_keys_may_be_left_out(tmp_path):
    bare = {"id": 3, "utterances": [{"role": "speaker", "text": "Hi"}]}
    (tmp_path / "own.jsonl").write_text("\n" + json.dumps(bare) + "\n\n")
    frame = read(tmp_path / "own.jsonl")
    assert frame.select("conversation_id", "emotion", "split", "row").rows() == [
        ("3", None, None, 2)
    ]


def without(key):
    return {name: value for name, value in CONVERSATION.items() if name != key}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"id": "x", ', "not readable as JSON"),
        ("[1]", "not readable as JSON: a line must be an object"),
        (json.dumps(without("id")), "missing key: 'id'"),
        (json.dumps(without("utterances")), "missing key: 'utterances'"),
        (json.dumps({**CONVERSATION, "utterances": []}), "not a list"),
        (json.dumps({**CONVERSATION, "utterances": [{"text": "x"}]}), "missing key: an utterance"),
        (json.dumps({**CONVERSATION, "emotion": "sadd"}), "'sadd': did you mean 'sad'?"),
        (json.dumps({**CONVERSATION, "split": "dev2"}), "unknown split 'dev2'"),
        (json.dumps({**CONVERSATION, "utterances": [{"role": "dog", "text": "x"}]}), "role 'dog'"),
        (json.dumps({**CONVERSATION, "utterances": [{"role": "speaker", "text": " "}]}), "empty"),
        (
            json.dumps(
                {**CONVERSATION, "utterances": [{"role": "speaker", "text": "x", "label": "glad"}]}
            ),
            "unknown label 'glad'",
        ),
    ],
)
def test_bad_lines_are_named_and_the_others_kept(tmp_path, line, problem):
    good = json.dumps({**CONVERSATION, "id": "good"})
    (tmp_path / "own.jsonl").write_text(f"{good}\n{line}\n")
    usable, bad = judged(tmp_path / "own.jsonl")
    assert usable["conversation_id"].unique().to_list() == ["good"]
    assert bad["row"].unique().to_list() == [2]
    assert problem in bad["problem"][0]


def test_bytes_that_are_not_utf8_are_one_bad_row(ed):
    ed.write_bytes(ED.encode() + b"c:2,1,sad,p,0,caf\xe9,,\n" + b"c:3,1,sad,p,0,fine,,\n")
    usable, bad = judged(ed)
    assert bad.select("row", "problem").rows() == [
        (6, "not UTF-8 (byte 0xe9 at position 17): save the file as UTF-8")
    ]
    assert "c:3" in usable["conversation_id"]


def test_bytes_that_are_not_utf8_in_quoted_csv(tmp_path):
    rows = b"conversation_id,turn,role,text\na,0,speaker,ok\nb,0,speaker,caf\xe9\n"
    (tmp_path / "own.csv").write_bytes(rows)
    _, bad = judged(tmp_path / "own.csv")
    assert bad["row"].to_list() == [3]
    assert "byte 0xe9" in bad["problem"][0]


def test_rows_count_lines_even_where_cells_hold_line_breaks(tmp_path):
    (tmp_path / "own.csv").write_text(
        'conversation_id,turn,role,text\na,0,speaker,"two\nlines"\nb,zero,speaker,hm\nc,0,speaker\n'
    )
    _, bad = judged(tmp_path / "own.csv")
    assert bad.select("row", "problem").rows() == [
        (4, "not a whole number: turn 'zero'"),
        (5, "wrong number of fields: expected 4, as in the header, got 3"),
    ]


def test_a_conversation_with_a_bad_turn_is_rejected(ed):
    lines = ED.splitlines(keepends=True)
    ed.write_text("".join([*lines[:2], "garbage\n", *lines[2:]]))
    usable, bad = judged(ed)
    assert usable["conversation_id"].unique().to_list() == ["c:1"]
    assert bad.select("row", "problem").rows() == [
        (2, "belongs to a rejected conversation: 'c:0', see row 3"),
        (3, "wrong number of fields: expected 8, got 1"),
        (4, "belongs to a rejected conversation: 'c:0', see row 3"),
    ]


def test_bad_rows_between_conversations_reject_none(ed):
    lines = ED.splitlines(keepends=True)
    ed.write_text("".join([*lines[:3], "garbage\n", *lines[3:]]))
    usable, bad = judged(ed)
    assert usable.height == 4
    assert bad["row"].to_list() == [4]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("c:2,1,sad,p,0,x,,\nc:2,3,sad,p,0,y,,\n", "wrong turn: 2 where 1 was expected"),
        ("c:2,one,sad,p,0,x,,\n", "not a whole number: utterance_idx 'one'"),
        ("c:0,3,sad,p,0,x,,\n", "occurs again: conversation 'c:0'"),
        ("c:2,1,sad,p,0,x,,\nc:2,2,glad,p,1,y,,\n", "unknown emotion 'glad'"),
        ("c:2,1,sad,p,0,x,,\nc:2,2,proud,p,1,y,,\n", "the emotion changes"),
        ("c:2,1,sad,p,0,,,\n", "empty text"),
    ],
)
def test_bad_rows_are_named(ed, rows, problem):
    ed.write_text(ED + rows)
    _, bad = judged(ed)
    assert any(text.startswith(problem) for text in bad["problem"])
    assert bad["row"].min() >= 6


def test_any_emotion_may_be_kept(tmp_path):
    (tmp_path / "own.jsonl").write_text(json.dumps({**CONVERSATION, "emotion": "zest"}))
    usable, _ = judged(tmp_path / "own.jsonl", any_emotion=True)
    assert usable["emotion"].to_list() == ["zest", "zest"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"id": None}, "no conversation id"),
        ({"id": ["x"]}, "not text: id is"),
        ({"utterances": [{"role": "speaker", "text": 5}]}, "not text: text is 5"),
        ({"utterances": [{"role": "speaker", "text": ["a"]}]}, "not text: text is ['a']"),
        ({"utterances": [{"role": "speaker", "text": "\ud83d"}]}, "lone surrogate"),
        ({"utterances": [{"role": "speaker", "text": "x", "cause": "maybe"}]}, "not true or false"),
    ],
)
def test_values_of_wrong_types_are_rejected(tmp_path, change, problem):
    (tmp_path / "own.jsonl").write_text(json.dumps({**CONVERSATION, **change}))
    _, bad = judged(tmp_path / "own.jsonl")
    assert problem in bad["problem"][0]


def test_deep_or_huge_json_is_one_bad_row(tmp_path):
    (tmp_path / "own.jsonl").write_text("[" * 100_000 + "\n" + '{"id": ' + "9" * 5000 + "}\n")
    _, bad = judged(tmp_path / "own.jsonl")
    assert bad["row"].to_list() == [1, 2]
    assert set(bad["problem"].map_elements(conversation_problem_kind, pl.String)) == {
        "not readable as JSON"
    }


def test_pandas_types_are_understood(tmp_path):
    rows = [{**row, "turn": float(row["turn"]), "cause": float(row["cause"])} for row in as_rows()]
    rows[1]["situation"] = rows[0]["situation"] = None
    pl.DataFrame(rows).write_parquet(tmp_path / "own.parquet")
    usable, _ = judged(tmp_path / "own.parquet")
    assert usable.select("turn", "cause").rows() == [(0, True), (1, False)]
    binary = pl.DataFrame(rows).with_columns(pl.col("text").cast(pl.Binary))
    binary.write_parquet(tmp_path / "own.parquet")
    _, bad = judged(tmp_path / "own.parquet")
    assert bad["problem"][0].startswith("not text: text is b'It is gone.'")


def test_an_unclosed_quotation_mark_is_named(tmp_path):
    rows = 'conversation_id,turn,role,text\na,0,speaker,hi\na,1,listener,"oh no\na,2,speaker,yes\n'
    (tmp_path / "own.csv").write_text(rows)
    raises(DataError, tmp_path / "own.csv", "auto", "row 3: a quotation mark opens here")


def test_quoted_empathetic_dialogues_are_detected(ed):
    ed.write_text(ED + 'c:2,1,sad,p,0,"I said, hello",,\n')
    _, bad = judged(ed)
    assert bad["problem"][0].startswith("quoted cell")
    assert bad["raw"][0] == 'c:2,1,sad,p,0,"I said, hello",,'


def test_meld_turns_that_go_back_are_not_taken(tmp_path):
    def line(turn, text):
        return f'{turn},{text},Ann,joy,positive,0,{turn},4,7,"0:21:01,927","0:21:03,261"\n'

    for turns in ((2, 0, 1), (0, 0, 1)):
        content = MELD_HEADER + "".join(line(turn, f"text {turn}") for turn in turns)
        (tmp_path / "dev.csv").write_text(content)
        usable, bad = judged(tmp_path / "dev.csv")
        assert usable.height <= 1  # a first line alone may stay: nobody answers it
        assert usable.height + bad.height == 3


def test_a_bad_row_rejects_its_own_conversation_only(tmp_path):
    (tmp_path / "own.csv").write_text(
        "conversation_id,turn,role,text\na,0,speaker,hi\na,1,listener,yes\na,2,speaker\n"
        "b,0,speaker,hi\nb,1,listener,yes\n"
    )
    usable, bad = judged(tmp_path / "own.csv")
    assert usable["conversation_id"].unique().to_list() == ["b"]
    assert bad["raw"].to_list() == [None, None, "a,2,speaker"]


def test_the_same_conversation_twice_in_a_row(tmp_path):
    (tmp_path / "own.jsonl").write_text(2 * (json.dumps(CONVERSATION) + "\n"))
    usable, bad = judged(tmp_path / "own.jsonl")
    assert usable["row"].to_list() == [1, 1]
    assert set(bad["row"]) == {2}
    assert bad["problem"][0].startswith("occurs again: conversation 'a1'")


def test_one_problem_is_not_reported_as_others(tmp_path):
    utterances = [{"role": "speaker", "text": "x", "label": "glad" if n == 1 else None}
                  for n in range(4)]  # fmt: skip
    (tmp_path / "own.jsonl").write_text(json.dumps({**CONVERSATION, "utterances": utterances}))
    _, bad = judged(tmp_path / "own.jsonl")
    kinds = [conversation_problem_kind(problem) for problem in bad["problem"]]
    assert kinds == [
        IN_REJECTED_CONVERSATION,
        "unknown label",
        IN_REJECTED_CONVERSATION,
        IN_REJECTED_CONVERSATION,
    ]


def test_a_bad_first_row_does_not_make_the_others_differ(ed):
    ed.write_text(ED_HEADER + "c:2,1\n" + "c:2,2,sad,p,1,y,,\n" + "c:2,3,sad,p,0,z,,\n")
    _, bad = judged(ed)
    assert [conversation_problem_kind(problem) for problem in bad["problem"]] == [
        "wrong number of fields",
        IN_REJECTED_CONVERSATION,
        IN_REJECTED_CONVERSATION,
    ]


def test_a_file_of_bad_rows_is_read_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ROWS_AT_A_TIME", 1)
    (tmp_path / "own.jsonl").write_text("garbage\n" * 400)
    frames = whole_conversations(Source(str(tmp_path)).read(Counter()))
    heights = [frame.height for frame in frames]
    assert sum(heights) == 400
    assert max(heights) < 40


@pytest.mark.parametrize(
    ("dialogue", "problem"),
    [
        ([[], []], "must be a list that contains one list"),
        ([[]], "no turn"),
        ([[{"turn": "1"}]], "missing key: turn 1 has no 'turn'"),
        ([[5]], "not an object"),
        ([[{"turn": 1, "speaker": "A", "utterance": "x", "emotion": "glee"}]], "unknown label"),
        (
            [[{"turn": 1, "speaker": "A", "utterance": "x", "emotion": "fear",
               "expanded emotion cause evidence": [99]}]],
            "wrong evidence",
        ),
    ],
)  # fmt: skip
def test_bad_reccon_dialogues_are_set_aside(tmp_path, dialogue, problem):
    good = [[{"turn": 1, "speaker": "A", "utterance": "x", "emotion": "fear"}]]
    (tmp_path / "test.json").write_text(json.dumps({"good": good, "bad": dialogue}))
    usable, bad = judged(tmp_path / "test.json")
    assert usable["conversation_id"].to_list() == ["good"]
    assert problem in bad["problem"][0]
    assert bad["row"].to_list() == [2]


def raises(error, path, form, match):
    with pytest.raises(error, match=match):
        read(path, form)


def test_unreadable_files_are_errors(tmp_path):
    cases = {
        "empty.csv": (b"", "ed", r"empty.csv is empty"),
        "wide.csv": ("conv_id".encode("utf-16"), "ed", r"wide.csv, row 1: .*UTF-16.*iconv"),
        "no_column.csv": (b"conv_id,utterance_idx,context,prompt\n", "ed", "row 1.*'speaker_idx'"),
        "meld.csv": (b"Utterance,Speaker\nx,y\n", "meld", "row 1: column 'Dialogue_ID'"),
        "own.csv": (b"conversation_id,text\na,b\n", "dialogues", "row 1: column 'role', 'turn'"),
        "own.parquet": (b"PAR1 not really", "dialogues", "not readable as Parquet"),
        "reccon.json": (b'{"a": [\n', "reccon", r"row \d: not readable as JSON"),
        "twice.json": (b'{"a": [], "a": []}', "reccon", "'a' occurs twice"),
        "latin.json": (b'{"a":\n "\xe9"}', "reccon", "row 2: not UTF-8"),
        "header.csv": (ED_HEADER.encode(), "ed", "has no rows"),
        "blank.jsonl": (b"\n\n", "dialogues", "has no rows"),
        "packed.jsonl.gz": (b"not gzip", "dialogues", "cannot be read to its end"),
        "cut.jsonl.gz": (gzip.compress(b"x" * 9999)[:40], "dialogues", "cannot be read"),
    }
    for name, (content, form, match) in cases.items():
        (tmp_path / name).write_bytes(content)
        raises(DataError, tmp_path / name, form, match)


def test_wrong_sources_are_named(tmp_path):
    raises(UsageError, tmp_path / "absent", "auto", "no such source")
    raises(UsageError, tmp_path, "auto", "no known format")
    raises(UsageError, tmp_path, "edoss", "did you mean 'edos'")
    raises(UsageError, tmp_path, "opus", "from subtitles first with 'attune data curate")
    raises(UsageError, tmp_path, "meld", "no file of format 'meld'")
    (tmp_path / "train.csv").write_text(ED)
    (tmp_path / "own.jsonl").write_text(json.dumps(CONVERSATION))
    raises(UsageError, tmp_path, "auto", "several formats .dialogues, ed.")
    (tmp_path / "own.jsonl").unlink()
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / "valid.csv").write_text(ED.replace("conv_id", "convid"))
    raises(UsageError, tmp_path, "auto", "'valid.csv' is not ed like the other files")
    raises(DataError, tmp_path, "ed", "valid.csv, row 1: column 'conv_id' is missing")
    raises(UsageError, "", "auto", "no such source")
    raises(UsageError, "bundled", "ed", "leave it out with 'bundled'")


def test_formats_are_recognised_however_files_are_named(tmp_path):
    (tmp_path / "TRAIN.CSV.gz").write_bytes(gzip.compress(ED.encode()))
    assert Source(str(tmp_path)).format == "ed"
    dialogue = [[{"turn": 1, "speaker": "A", "utterance": "x", "emotion": "fear"}]]
    for indent in (None, 2):
        (tmp_path / "r.json").write_text(json.dumps({"a": dialogue}, indent=indent))
        assert Source(str(tmp_path / "r.json")).format == "reccon"


def test_small_chunks_give_the_same_frame(ed, monkeypatch):
    whole = read(ed)
    monkeypatch.setattr(files, "ROWS_AT_A_TIME", 1)
    assert len(list(files.read_file_lines(ed))) > 1
    assert read(ed).equals(whole)
