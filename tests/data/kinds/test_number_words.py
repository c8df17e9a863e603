"""Number words are correct in seven languages, and no held-out number occurs in training."""

import random
from collections import Counter

import pytest

from transformer.data.kinds import _number_words as number_words
from transformer.data.kinds._number_words import NORMALIZATION_OF, Language
from transformer.data.tokenizers._normalization import NORMALIZERS

KNOWN = {
    "en": {
        0: "zero",
        13: "thirteen",
        40: "forty",
        100: "one hundred",
        742: "seven hundred and forty-two",
        1_001: "one thousand and one",
        1_100: "one thousand one hundred",
        12_345: "twelve thousand three hundred and forty-five",
        999_999: "nine hundred and ninety-nine thousand nine hundred and ninety-nine",
    },
    "es": {
        0: "cero",
        16: "dieciséis",
        21: "veintiuno",
        100: "cien",
        101: "ciento uno",
        500: "quinientos",
        742: "setecientos cuarenta y dos",
        1_000: "mil",
        1_021: "mil veintiuno",
        21_000: "veintiún mil",
        31_000: "treinta y un mil",
        101_000: "ciento un mil",
        201_021: "doscientos un mil veintiuno",
        221_031: "doscientos veintiún mil treinta y uno",
        100_001: "cien mil uno",
    },
    "pt": {
        0: "zero",
        16: "dezasseis",
        100: "cem",
        101: "cento e um",
        742: "setecentos e quarenta e dois",
        1_100: "mil e cem",
        1_101: "mil cento e um",
        1_021: "mil e vinte e um",
        2_500: "dois mil e quinhentos",
        21_345: "vinte e um mil trezentos e quarenta e cinco",
        200_100: "duzentos mil e cem",
    },
    "ru": {
        0: "ноль",
        40: "сорок",
        742: "семьсот сорок два",
        1_000: "одна тысяча",
        2_002: "две тысячи два",
        5_000: "пять тысяч",
        11_000: "одиннадцать тысяч",
        21_001: "двадцать одна тысяча один",
        112_000: "сто двенадцать тысяч",
        202_000: "двести две тысячи",
        594_000: "пятьсот девяносто четыре тысячи",
    },
    "fr": {
        0: "zéro",
        21: "vingt et un",
        71: "soixante et onze",
        80: "quatre-vingts",
        81: "quatre-vingt-un",
        91: "quatre-vingt-onze",
        200: "deux cents",
        201: "deux cent un",
        1_000: "mille",
        80_000: "quatre-vingt mille",
        200_000: "deux cent mille",
        180_380: "cent quatre-vingt mille trois cent quatre-vingts",
    },
    "de": {
        0: "null",
        1: "eins",
        16: "sechzehn",
        17: "siebzehn",
        21: "einundzwanzig",
        30: "dreißig",
        101: "einhunderteins",
        742: "siebenhundertzweiundvierzig",
        1_001: "eintausendeins",
        21_000: "einundzwanzigtausend",
        101_000: "einhunderteintausend",
        201_021: "zweihunderteintausendeinundzwanzig",
    },
    "it": {
        0: "zero",
        3: "tre",
        21: "ventuno",
        23: "ventitré",
        28: "ventotto",
        103: "centotré",
        118: "centodiciotto",
        123: "centoventitré",
        180: "centottanta",
        1_000: "mille",
        2_003: "duemilatré",
        3_000: "tremila",
        23_000: "ventitremila",
        21_000: "ventunomila",
        123_456: "centoventitremilaquattrocentocinquantasei",
        318_218: "trecentodiciottomiladuecentodiciotto",
    },
}


@pytest.mark.parametrize("language", Language.__args__)
def test_number_words_equal_known_forms(language):
    assert {number: number_words.words(number, language) for number in KNOWN[language]} == KNOWN[language]


@pytest.mark.parametrize("language", Language.__args__)
def test_distinguishes_numbers_after_normalization(language):
    normalize = NORMALIZERS[NORMALIZATION_OF.get(language, "number_words")]
    numbers = {*range(400), *range(0, 1_000_000, 3_701), *random.Random(0).sample(range(1_000_000), 400)}
    assert len({normalize(number_words.words(number, language)) for number in numbers}) == len(numbers)


@pytest.mark.parametrize(
    "text",
    [
        "seven hundred and forty-two",
        "seven hundred forty two",
        "Seven Hundred and Forty\u2011Two",
        "  SEVEN HUNDRED,  forty-two. ",
    ],
)
def test_english_numbers_have_several_valid_forms(text):
    assert NORMALIZERS["english_number_words"](text) == "seven hundred forty two"


def test_accepts_other_spelling_variants():
    assert NORMALIZERS["english_number_words"]("A thousand and one") == "one thousand one"
    assert NORMALIZERS["portuguese_number_words"]("Dezesseis mil e dezenove") == "dezasseis mil e dezanove"
    assert NORMALIZERS["number_words"]("Vingt-et-un") == "vingt et un"
    assert NORMALIZERS["number_words"]("diecise\u0301is") == "diecis\u00e9is", "composed letters"
    assert NORMALIZERS["none"]("  A-b, c ") == "  A-b, c "


def test_rejects_numbers_without_words():
    with pytest.raises(ValueError, match=r"language.*, got 'eng'.*'en'\?"):
        number_words.words(1, "eng")
    for number in (-1, 1_000_000):
        with pytest.raises(ValueError, match=rf"number.*0.*999,999.*got {number}"):
            number_words.words(number, "en")


def test_all_basic_numbers_are_trained_and_never_held_out():
    basic = number_words.basic_numbers(3)
    assert basic == [*range(21), 30, 40, 50, 60, 70, 80, 90, 100, 200, 300, 400, 500, 600, 700, 800, 900]
    held_out = {n for split in ("test", "validation") for n in number_words.held_out_numbers(split, 6, 2_000)}
    assert held_out.isdisjoint(number_words.basic_numbers(6))


def test_the_split_of_a_number_depends_only_on_its_hash():
    """The splits must not change: numbers in the training data of old checkpoints would become test numbers."""
    assert [n for n in range(21, 100) if n % 10 and number_words.role(n) == "test"] == [33, 44, 51, 57, 59, 71, 74]
    assert [n for n in range(21, 100) if n % 10 and number_words.role(n) == "validation"] == [26, 31, 68, 83, 99]


def test_held_out_numbers_are_balanced_by_digits_and_disjoint():
    test = number_words.held_out_numbers("test", 6, 1_000)
    assert len(set(test)) == 1_000
    assert {number_words.role(n) for n in test} == {"test"}
    digits = Counter(len(str(n)) for n in test)
    supply = Counter(
        len(str(n)) for n in range(1_000) if number_words.role(n) == "test" and n not in number_words.basic_numbers(6)
    )
    assert (digits[2], digits[3]) == (supply[2], supply[3]), "all that exist"
    assert max(digits[4], digits[5], digits[6]) - min(digits[4], digits[5], digits[6]) <= 1
    validation = number_words.held_out_numbers("validation", 6, 500)
    assert len(validation) == 500
    assert set(validation).isdisjoint(test)


def test_too_few_held_out_numbers_are_an_error(monkeypatch):
    monkeypatch.setattr(number_words, "role", lambda number: "train")
    with pytest.raises(RuntimeError, match=r"0.*50.*5.*'test'"):
        number_words.held_out_numbers("test", 6, 100)


def test_training_numbers_exclude_held_out_numbers():
    numbers = number_words.training_numbers(6, 20_000)
    assert len(numbers) == 20_000
    basic = set(number_words.basic_numbers(6))
    assert {number_words.role(n) for n in set(numbers) - basic} == {"train"}
    assert basic <= set(number_words.training_numbers(6, 200)), "0-20 and d x 10^k always occur, whatever is drawn"
    share = {digits: count / len(numbers) for digits, count in Counter(len(str(n)) for n in numbers).items()}
    assert sorted(share) == [1, 2, 3, 4, 5, 6]
    assert min(share.values()) > 0.12, share
    assert max(share.values()) < 0.22, share
    rounds = sum(n not in basic and len(str(n).strip("0").replace("0", "")) <= 2 and n > 99 for n in numbers)
    assert rounds / len(numbers) > 0.08
    assert numbers == number_words.training_numbers(6, 20_000)
