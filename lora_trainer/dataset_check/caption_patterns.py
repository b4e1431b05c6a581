"""What exporters and captioners leave in captions: patterns, no model. docs/scores.md has what each of them finds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_trainer.core.findings import Severity

MOST_LETTERS = 4000  # of a caption that are compared with the patterns
FEWEST_REPEATS = 3  # of a sentence, or of a group of words
MOST_GROUP_WORDS = 10
FEWEST_WORD_REPEATS = 8  # of one word: "ha ha ha ha ha ha" and "very, very" are language
SHORTEST_PART = 8  # letters of a part that is repeated; a whole sentence has twice as many
FIRST_CHINESE = "\u2e80"  # from here on Chinese, Japanese and Korean
FEWEST_CUT_WORDS = 8  # shorter captions are titles, which may end with any word
LONGEST_END = 16  # letters at the end that show whether a sentence is cut off
DESCRIBE = "Write what the image shows."
KEEP_DESCRIPTION = "Keep the description alone."


@dataclass(frozen=True)
class CaptionPattern:
    """`finds` says whether a caption has it. The message continues "has a caption".

    `marks`, where there are any, are lower-case: only captions with one of them are looked at, because that is quick.
    """

    code: str
    severity: Severity
    message: str
    fix: str
    finds: Callable[[str], object]
    marks: tuple[str, ...] = ()


def _whole(*patterns: str) -> Callable[[str], object]:
    """The whole caption is one of these, in any case."""
    return re.compile("|".join(f"(?:{each})" for each in patterns), re.IGNORECASE).fullmatch


def _begins(*patterns: str) -> Callable[[str], object]:
    """The caption begins with one of these, in any case."""
    return re.compile("|".join(f"(?:{each})" for each in patterns), re.IGNORECASE).match


def _anywhere(*patterns: str) -> Callable[[str], object]:
    """One of these is somewhere in the caption, in any case."""
    return re.compile("|".join(f"(?:{each})" for each in patterns), re.IGNORECASE).search


def _any_of(*tests: Callable[[str], object]) -> Callable[[str], object]:
    return lambda caption: any(test(caption) for test in tests)


NOTHING = r"[#\[<({]*(none|null|nil|nan|n/?a|undefined|untitled|todo|to-?do|t\.?b\.?d|fixme|placeholder)[\]>)}.:!?]*"
PLACEHOLDER = _any_of(
    _whole(
        rf"{NOTHING}([,;. ]+{NOTHING})*",
        r"test( caption| image| \d+)?|true|false",
        r"#(name\?|ref!|value!|div/0!|null!|num!|n/a|spill!|calc!)",  # of Excel
        r"no photo description available\.?",
        r"[\[<({]*(no|missing|empty|your|insert|enter|add|write)( an?| your| the)? (caption|description|prompt)"
        r"( here| available| provided| found| yet)?[\]>)}.:!?]*",
        r"[\[<({]*(caption|description|prompt)( goes)?( here| missing| to follow)?[\]>)}.:!?]*",
    ),
    re.compile(r"(TODO|FIXME|TBD)\b\W").match,  # "todo" begins Spanish sentences
    _begins(r"lorem ipsum( dolor\b|$)"),
)
IMAGE_ENDING = r"\.(png|jpe?g|jfif|webp|gif|bmp|tiff?|hei[cf]|avif|jxl|psd|txt|caption)"
FILE_NAME = _whole(
    rf"(\S+ ){{0,2}}\S*\w{IMAGE_ENDING}",
    # Cameras and phones, and the words that programs put before a number.
    r"(img|_?dsc|dsc[nf]|pxl|mvimg|fb_img)[-_ ]?\d{3,}[-_ \d()]*",
    r"(gopr|dji|sam|cimg|pict|vid|wp|scan|received|snapchat)[-_]?\d{3,}[-_\d()]*",
    r"(image|photo|pic(ture)?|frame|screenshot|screen shot|untitled|comfyui|capture|render|output|tmp|temp|file)"
    r"([-_]+| ?[(#]|(?! \d\d?$) ?)(?!(19|20)\d\d$)\d+[-_)]*",  # not "image 5", which somebody may have written
    r"(screenshot|screen shot|whatsapp image|photo|img|pxl|signal)[-_ ]\d{4}-?\d\d-?\d\d\b[-_ .:\w]*",
    r"(unnamed|download|untitled( design| project| document)?)([-_ ]*\(?\d+\)?)?|fullsizerender",
    r"(pexels|shutterstock|istock(photo)?|adobestock|gettyimages|depositphotos|unsplash|pixabay|freepik|tumblr)[-_]\S*\d\S*",
    r"dall[-·. ]?e[-_ ]\d{4}-\d\d-\d\d.*",
    r"p\d{7}",
    r"(19|20)\d\d[-_.]\d\d[-_.]\d\d",
    r"0\d{3,}",
    r"(19|20)\d{6}[-_ ]\d{4,}.*",
    r"(19|20)\d\d-\d\d-\d\d[-_ T]\d\d[.:h-]\d\d.*",
    r"\d{4,6}-\d{7,10}(-.*)?",  # number and seed of A1111
    r"\d{6,}",  # of a gallery; numbers and years are shorter
    r"(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{16,}",
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    r"([a-z]:\\|/|\./|~/)\S*\w\w[\\/]\S*\w\w",
)
NUMBER = r"-?(\d+(\.\d*)?|\.\d+)(e-?\d+)?"
NUMBERS = _whole(
    r"-?[01]?\.\d{3,}",  # a probability
    rf"(?=.*(\.\d|\d{{3}}))[\[(]*{NUMBER}([,; ]+{NUMBER}){{2,}}[\])]*",
    rf"(?=.*\.\d)\w+([,; ]+{NUMBER}){{4,}}",  # the class, and a box
)
ERROR = _any_of(
    _whole(
        r"(internal server error|bad gateway|service unavailable|gateway time-?out|too many requests|connection (error|refused|reset)"
        r"|(request|read|connection) timed out|rate limit( exceeded| reached)?)[.!]?",
        r"([45]\d\d:? )(bad request|unauthorized|forbidden|not found|too many requests|internal server error|bad gateway|service unavailable|gateway time-?out)[.!]?",
    ),
    _begins(
        r"(http )?(error|status)( code)?\W{0,3}[45]\d\d\b",
        r"error: (failed|could not|cannot|unable|no |api|request|timeout|connection|rate limit|invalid)",
        r"rate limit (exceeded|reached)\b",
        r"(\S+ )?cuda (error|out of memory)\b",
        r"traceback \(most recent call last\)",
        r"(?-i:([a-z_]\w*\.)*[A-Z]\w*(Error|Exception)\b ?[:(])",
        r"https?connectionpool\(",
        r"\W?nonetype\W? object",
        r"(the |your )?(response|request|prompt|content|output) was (blocked|rejected|filtered|flagged)\b.{0,40}\b(safety|polic|filter|system)",
        r"you exceeded your current quota",
    ),
)
URL = _any_of(_whole(r"(https?://|ftp://|www\.)\S+"), _anywhere(r"(?<![\"'“‘«„(])https?://\S"))
CANNOT = r"(can(no|['’])?t|cannot|could ?n[o'’]t|am unable|['’]m unable|am not able|['’]m not able|won['’]t be able|will not)"
HELP = (
    r"(help( you\b| with\b| identif| describ|\W*$)|assist|fulfil|comply|provide|create|generate|describe|identify|caption|analy|view\b|process|access|engage|discuss|"
    r"continue|do (that|this)|answer|determine|recogni[sz]e|(see|find|open|load) (an|any|the|this|that|your) (image|photo|pic(ture)?))"
)
REFUSAL = _any_of(
    _begins(
        rf"\W*((i['’]?m|i am)( really| very| so)? (sorry|afraid)|sorry|unfortunately|i apologi[sz]e|my apologies)\b.{{0,40}}?"
        rf"(\bno image\b|({CANNOT}|\bunable to\b|\bdo(n['’]t| not)\b).{{0,20}}?\b{HELP})",
        rf"\W*i {CANNOT}( to)?( \w+){{0,2}} {HELP}",
        rf"\W*i['’]m (unable|not able) to( \w+){{0,2}} {HELP}",
        r"\W*i (must|have to|need to)( respectfully| politely)? decline",
        r"\W*i (don['’]t|do not) (have (the ability|access)|see (an|any|the) image)",
        r"\W*(es )?tut mir leid,? (aber )?ich",
        r"\W*(je suis )?désolée?,? (mais )?je (ne|n['’])",
        r"\W*lo siento,? (pero )?no",
        r"\W*mi dispiace,? (ma )?non",
        r"\W*(desculpe|sinto muito),? (mas )?não",
        r"\W*(非常|很)?抱歉[，,].{0,8}(无法|不能|没有)",
        r"\W*(对不起|對不起)[，,]我",
        r"\W*我(无法|無法|不能)(描述|提供|识别|回答|协助|看到|处理|生成)",
        r"\W*作为一[个個]?(ai|人工智能|语言模型)",
        r"\W*(大変)?(申し訳(ありません|ございません)|すみません)が",
        r"\W*죄송(합니다|하지만)",
        r"\W*(извините|к сожалению),? (но )?я не",
    ),
    _anywhere(
        r"\bas an? (ai\b( (language|vision) model| assistant|,)|(large )?language model)",
        r"\bi (can(no|['’])t|cannot) (assist|help) with (that|this)",
        r"\bno image (was|has been|is) (provided|attached|uploaded|included)",
        r"\bplease (provide|upload|share) (an|the|your) image\b",
    ),
)
REFUSAL_MARKS = (
    "sorry", "afraid", "fortunately", "apologi", "i can", "i could", "i am", "i'm", "i’m", "i won", "i will", "decline", "i don", "i do ",
    "as a", "image", "tut mir", "désolé", "lo siento", "dispiace", "desculpe", "sinto", "抱歉", "对不起", "對不起", "我", "作为", "申し訳",
    "すみません", "죄송", "извините", "сожалению",
)  # fmt: skip
NOUN = r"(caption|description|prompt|tags|summary|breakdown)"
CHAT_BEGINS = _begins(
    r"\W*(sure|certainly|of course|absolutely|okay|ok|got it|great)[!,.:]+ (here['’]s\b|here (is|are)\b|(i['’](ll|ve)|let me) (describ|help|provid|writ|creat|generat|caption|analy))",
    rf"\W*here(['’]s| is| are|['’]re)\b.{{0,60}}?\b{NOUN}\b.{{0,60}}?[:.]",
    rf"\W*(this is|below is|following is|the following is) .{{0,30}}?\b{NOUN} (of|for) the\b",
    r"\W*(the|a|my|suggested) \b(caption|description|prompt) (of|for) (the|this|your) (image|photo|pic(ture)?)\b.{0,20}:",
    r"[*#_ ]*(image )?(caption|description|prompt|assistant|beschreibung|bildunterschrift|légende)\W{0,3}:",
    r"[*#_ ]*question\W{0,3}:.{1,200}\banswer\W{0,3}:",
    r"(the )?(image )?may be an? (\S+ ){0,4}(image|photo|drawing|meme|screenshot|closeup|cartoon|doodle) of\b",
    r"\W*(voici|aquí (está|tienes)|ecco)\b.{0,30}?\b(description|légende|descripción|didascalia|descrizione)\b",
    r"\W*(hier ist|gerne[,!] hier)\b.{0,30}?\b(beschreibung|bildunterschrift)\b",
    r"\W*(好的[，,！]|以下是|这是).{0,20}(描述|说明|标签)[：:]",
)
CHAT = _anywhere(
    r"\b(let me know (if|what|how|whether)|feel free to (ask|reach|let)|would you like me to|is there anything else)\b",
    r"\bi hope (this|that) (helps|description|caption)",
    r"<\|[a-z_]{2,20}\|>|</?think>|\[/?inst\]",
    r"```|^#{1,6} \w",
)
CHAT_MARKS = (
    "let me know",
    "feel free to",
    "you like me to",
    "is there anything else",
    "i hope th",
    "<",
    "inst]",
    "```",
    "# ",
)
# One of these is a word of its own in captions of shops and of science.
NUMBERED_OPTION = r"\b(steps|sampler|schedule type|cfg scale|guidance scale|seed|model hash|denoising strength|clip skip|hires \w+)\s*:\s*(\w*\d|euler|dpm|ddim|lms|heun|unipc|lcm|karras)"
PARAMETERS = _any_of(
    lambda caption: caption.count(":") > 1 and len(re.findall(NUMBERED_OPTION, caption, re.IGNORECASE)) > 1,
    _anywhere(
        r"\bnegative prompt\s*:",
        r"\bsteps\s*:\s*\d+\s*,",
        r"<(lora|lyco|hypernet|lokr):[^<>]+>",
        r"(?<!\S)--(ar|aspect|niji|stylize|chaos|weird|iw|sref|cref|style|seed|quality) [\w.:-]+",
        r"(?<!\S)--[vqswhdlg] \d",
        r"(?<!\S)--n \S",
    ),
)
TAG_NAMES = (
    "p|br|hr|b|i|u|s|em|strong|small|sub|sup|span|div|a|img|ul|ol|li|h[1-6]|font|center|table|tr|td|th|body|html|head|"
    "script|style|pre|code|blockquote|caption|detailed_caption|more_detailed_caption|od|image|bos|eos|unk|pad|loc_\\d+"
)
QUOTED = r"('[^']*'|\"[^\"]*\")"
MARKUP = _any_of(
    _anywhere(
        rf"(?<!text )(?<!says )(?<!reads )(?<!word )(?<!code )(?<!tag )</?({TAG_NAMES})(\s[^<>]{{0,200}})?/?>",
        r"<[\w.]+( [\w.]+){0,4} at 0x[0-9a-f]{4,}>",
        r"\b(np|numpy)\.str_\(",
        r"&(amp|lt|gt|quot|apos|nbsp|#\d{2,6}|#x[0-9a-f]{2,6});",
        r"\\u[0-9a-f]{4}",
        r"\w[.,!?\"']?\\[nrt](?-i:(?![a-z]))|\\\"",
        r"\[/?(url|img|quote|unused\d+|sep|cls|pad|mask|unk)\]",
    ),
    _begins(
        r"\W{0,2}\{\s*[\"'“][\w ]+[\"'”]\s*:",
        r"\[\s*(\"[^\"]*\"|'[^']*'|\{[^}]*\})\s*[,\]]",
        r"<\?xml|<!doctype|<!--|<svg",
        r"\{\\rtf\d|%pdf-\d",
    ),
    _whole(
        rf"(?=.*,)\(\s*{QUOTED}(\s*,\s*{QUOTED})*\s*,?\s*\)",  # a tuple of Python
        rf"b{QUOTED}",
        r"(dict_(keys|values|items)|array|tensor|ordereddict|list|tuple|set)\([\[({'\"\d].*\)",
    ),
)
ESCAPED = re.compile(r"\\\([^()\\]{1,200}\\\)|\\\[[^][\\]{1,200}\\\]")
WEIGHTED = re.compile(r"\([^()]{1,200}:[0-2]\.\d{1,2}\)")
SENTENCES, PARTS = re.compile(r"[.!?](?:\s+|$)|[。！？]"), re.compile(r"[.!?;,:|。！？；，、]+")
WORD = re.compile(r"\w+")
# A group of different words, or one word more often: the group "ha ha" is the word "ha" twice.
LOOPING = re.compile(
    rf"\b(?!(\w+)(?:[ ,.]+\1\b){{5}})(\w+(?: \w+){{1,{MOST_GROUP_WORDS - 1}}})(?:[ ,.]+\2\b){{{FEWEST_REPEATS - 1},}}"
    rf"|\b(\w+)(?:[ ,.]+\3\b){{{FEWEST_WORD_REPEATS - 1},}}",
    re.IGNORECASE,
)
# Words after which no sentence ends, in English, German, French, Spanish and Italian.
UNFINISHED = re.compile(
    r"\b(?:a|the|and|or|its|their|whose|your|my|our|into|onto|than|while|because|und|oder|der|einem|eines|vom|zum|zur|"
    r"le|les|une|des|aux|et|unos|unas|del|gli|nel|nella|della|dei)$"
)
# After whole sentences these too: a title or a single phrase may end with them.
MORE_SENTENCES = re.compile(r"\w{2}[.!?] +[A-Z]")
UNFINISHED_LATER = re.compile(r"\b(?:an|of|with|has|have|wearing|holding|featuring)$")
NAMED_LETTER = re.compile(
    r"\b(?:letter|type|vitamin|grade|plan|note|group|class|size|hepatitis|and|or) a$", re.IGNORECASE
)


def _repeats(caption: str) -> bool:
    """A whole sentence twice, a part of one three times, or a group of words three times on end."""
    pairs = list(pairwise(WORD.findall(caption.casefold())))
    times_of = Counter(pairs)
    most = max(times_of.values(), default=0)
    has_chinese = not caption.isascii() and max(caption) >= FIRST_CHINESE
    if most < 2 and not has_chinese:
        return False  # what is repeated has two words that are
    for marks, shortest, fewest in ((SENTENCES, 2 * SHORTEST_PART, 2), (PARTS, SHORTEST_PART, FEWEST_REPEATS)):
        if most < fewest and not has_chinese:
            continue
        parts = Counter(" ".join(each.split()).casefold() for each in marks.split(caption))
        for part, times in parts.items():
            is_chinese = part[:1] >= FIRST_CHINESE  # no spaces, and fewer letters
            letters = 2 * len(part) if is_chinese else len(part)
            if times >= fewest and letters >= shortest and (is_chinese or " " in part):
                return True
    if most < FEWEST_REPEATS:
        return False
    # Groups on end begin at equal distances. Few captions have pairs that do, and the expression is slow.
    places = {place for place, pair in enumerate(pairs) if times_of[pair] >= FEWEST_REPEATS}
    for step in range(1, MOST_GROUP_WORDS + 1):
        if any(place + step in places and place + 2 * step in places for place in places):
            return LOOPING.search(caption) is not None
    return False


def _is_cut_off(caption: str) -> bool:
    """Prose that ends with a word after which no sentence ends. Tags end with anything."""
    end = caption[-LONGEST_END:]
    unfinished, unfinished_later = UNFINISHED.search(end), UNFINISHED_LATER.search(end)
    if not unfinished and not unfinished_later:
        return False
    words = caption.split()
    if len(words) < FEWEST_CUT_WORDS or caption.count(",") * 3 > len(words):
        return False
    if unfinished_later and MORE_SENTENCES.search(caption):
        return True
    return unfinished is not None and NAMED_LETTER.search(end) is None


# The first that finds something is reported; the ways in which a caption is none at all come first.
LEFT_BEHIND = (
    CaptionPattern("placeholder_caption", "warning", "that was never written", DESCRIBE, PLACEHOLDER),
    CaptionPattern(
        "refusal_caption", "warning", "in which a model refuses to describe it", DESCRIBE, REFUSAL, REFUSAL_MARKS
    ),
    CaptionPattern("url_caption", "warning", "with an address on the web", DESCRIBE, URL, ("://", "www.")),
    CaptionPattern("error_caption", "warning", "that is the error of a program", DESCRIBE, ERROR),
    CaptionPattern("numbers_caption", "warning", "that is numbers, as labels for a detector are", DESCRIBE, NUMBERS),
    CaptionPattern("file_name_caption", "warning", "that is the name of a file", DESCRIBE, FILE_NAME),
    CaptionPattern(
        "parameters_caption",
        "warning",
        "with parameters of a generated image",
        "Keep the prompt alone.",
        PARAMETERS,
        (":", "<", "--"),
    ),
    CaptionPattern(
        "markup_caption",
        "warning",
        "with markup or code",
        "Keep the text alone.",
        MARKUP,
        ("<", "&", "[", "{", "\\", "(", "b'", 'b"', "%pdf-"),
    ),
    CaptionPattern("chat_caption", "warning", "in which a model speaks to its user", KEEP_DESCRIPTION, CHAT_BEGINS),
    CaptionPattern(
        "chat_caption", "warning", "in which a model speaks to its user", KEEP_DESCRIPTION, CHAT, CHAT_MARKS
    ),
    CaptionPattern("looping_caption", "warning", "that repeats itself", "Keep what is there once.", _repeats),
    CaptionPattern("cut_off_caption", "note", "that ends in the middle of a sentence", "Write the rest.", _is_cut_off),
)
CODES = frozenset(each.code for each in LEFT_BEHIND)


def left_behind(caption: str) -> CaptionPattern | None:
    """What a program left in a caption, or in one of its lines; None where it is as somebody would write it."""
    caption = caption[:MOST_LETTERS]
    lowered = caption.lower()
    lines = [line.strip() for line in caption.splitlines()]
    for each in LEFT_BEHIND:
        is_possible = not each.marks or any(mark in lowered for mark in each.marks)
        if is_possible and any(each.finds(line) for line in lines if line):
            return each
    return None


# What another program reads, and this one only with an option of captions, if at all.
WITHOUT_WEIGHTING = (
    CaptionPattern(
        "escaped_brackets",
        "warning",
        "whose backslashes are trained as letters",
        r"--set captions.prompt_weighting=true, which reads \( as a bracket, as ComfyUI does; or remove the backslashes.",
        ESCAPED.search,
    ),
    CaptionPattern(
        "literal_weights",
        "warning",
        "whose weights are trained as letters",
        "--set captions.prompt_weighting=true, or remove brackets and numbers.",
        WEIGHTED.search,
    ),
)
WITHOUT_WILDCARDS = CaptionPattern(
    "literal_wildcards",
    "warning",
    "whose choices are all trained as letters",
    "--set captions.wildcards=true, or write one of them.",
    re.compile(r"\{[^{}|]{1,200}\|[^{}]{1,200}\}").search,
)
WITHOUT_TRIGGER = CaptionPattern(
    "literal_trigger",
    "warning",
    "whose placeholder is trained as letters",
    "--set captions.trigger_word=WORD, and write [trigger] where it belongs.",
    _anywhere(r"\[trigger(_?word)?\]|\{trigger(_?word)?\}|<trigger(_?word)?>"),
)
LITERAL_SYNTAX = CaptionPattern(
    "literal_syntax",
    "warning",
    "with what only another program reads",
    "Remove it.",
    _any_of(
        _anywhere(
            r"\[(name|filewords)\]",
            r"(?<!\w)__[a-z][\w/-]*[a-z0-9]__(?!\w)",
            r"(?<!\w)embedding:\w",
            r"\[[^][:]{0,200}:([^][:]{0,200}:)?[01]?\.\d+\]",
        ),
        re.compile(
            r"(?<![A-Z\"'“])(?<![A-Z] )(?<!says )(?<!reads )(?<!text )(?<!word )\bBREAK\b(?![\"'”]| [A-Z]{2})"
        ).search,
    ),
    ("[", "__", "embedding:", "break"),
)
WITHOUT_OPTION = (*WITHOUT_WEIGHTING, WITHOUT_WILDCARDS, WITHOUT_TRIGGER, LITERAL_SYNTAX)
