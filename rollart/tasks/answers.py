"""Is this answer right? The rewards that a dataset can name: `exact`, `regex`, `choice`, `math_verify`.

Each compares what the model said with the answer of a row, and gives 1 or 0. No state, nothing to set up: they run
wherever reward functions run. math-verify is imported when it is first asked.
"""

import re
import string
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation

Judge = Callable[[str, Sequence[str], str], bool]
"""(what was said, the answers that are right, the job's pattern) -> whether it is."""


def exact(said: str, answers: Sequence[str], pattern: str) -> bool:
    """What was said, without space around it, is an answer."""
    return said.strip() in [answer.strip() for answer in answers]


def regex(said: str, answers: Sequence[str], pattern: str) -> bool:
    """What the pattern finds last (its first group, where it has one) is an answer: the same number, or words."""
    found = extracted(pattern, said)
    return found is not None and any(_same(found, answer) for answer in answers)


def choice(said: str, answers: Sequence[str], pattern: str) -> bool:
    """The last letter of a choice (`pattern` has which there are) that stands alone, in brackets or not, is that of the
    answer."""
    letters = re.findall(rf"(?<![A-Za-z0-9'])({pattern or '[A-Z]'})(?![A-Za-z0-9'])", said)
    return bool(letters) and letters[-1] in answers


def math_verify(said: str, answers: Sequence[str], pattern: str) -> bool:
    """math-verify takes both for the same: as numbers, expressions, sets or intervals, in LaTeX or plain."""
    from math_verify import parse, verify

    # Its time limits are signals, which only a process's main thread may set.
    limited = threading.current_thread() is threading.main_thread()
    limit_s = 5 if limited else None
    target = parse(said, parsing_timeout=limit_s)
    golds = [parse(_in_dollars(answer), parsing_timeout=limit_s) for answer in answers]
    return any(verify(gold, target, timeout_seconds=limit_s) for gold in golds)


JUDGES: dict[str, Judge] = {judge.__name__: judge for judge in (exact, regex, choice, math_verify)}


def extracted(pattern: str, text: str) -> str | None:
    """What the pattern finds last in a text: its first group, or all of it where it has none."""
    every = list(re.finditer(pattern, text))
    if not every:
        return None
    found = every[-1]
    return str(found.group(1) if found.re.groups else found.group()).strip()


def letter(answer: object, choices: Sequence[str], labels: Sequence[str]) -> str:
    """The letter of the right choice: the answer is its text, its label or its position from 0. Raises ValueError."""
    text = str(answer).strip()
    for names in (choices, labels):
        if text in names:
            return letters(len(choices))[list(names).index(text)]
    if text.isdigit() and int(text) < len(choices):
        return letters(len(choices))[int(text)]
    raise ValueError(f"the answer {text!r} is neither one of the choices, nor a letter or a position of one")


def letters(count: int) -> list[str]:
    if count > len(string.ascii_uppercase):
        raise ValueError(f"{count} choices are more than there are letters")
    return list(string.ascii_uppercase[:count])


def _in_dollars(answer: str) -> str:
    """LaTeX is only looked for between dollars."""
    return answer if "$" in answer or "\\boxed" in answer or "\\" not in answer else f"${answer}$"


def _same(said: str, answer: str) -> bool:
    numbers = _number(said), _number(answer)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return _words(said) == _words(answer)


def _number(text: str) -> Decimal | None:
    """1,234 and $1234. are the number 1234."""
    try:
        number = Decimal(text.strip().strip("$€£%").rstrip(".").replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _words(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")
