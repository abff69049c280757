"""Fixed texts on which two tokenizers are compared: many scripts, and cases in which tokenizers often differ."""

from __future__ import annotations

ENGLISH = "The accelerator answers first; the CPU's overflow wasn't late (3,141 queries/s)."
PLAIN = {
    "English": ENGLISH,
    "German": "Größere Übermäßigkeit: ein Überlauf für 7 Straßen.",
    "French": "L'été où déjà ça a coûté 12,50 € à Noël, naïvement.",
    "Vietnamese": "Tiếng Việt có nhiều dấu thanh.",
    "Turkish": "İstanbul'da ılık bir akşam.",
    "Russian": "Очередь переполнена, попробуйте позже.",
    "Greek": "Η ουρά είναι γεμάτη, δοκιμάστε αργότερα.",
    "Chinese": "加速器先回答，溢出的请求交给CPU处理。",
    "Japanese": "アクセラレータが先に答え、あふれた分はCPUが処理する。",
    "Korean": "가속기가 먼저 응답하고 넘치는 요청은 CPU가 처리한다.",
    "Arabic": "المسرّع يجيب أولاً ثم المعالج.",
    "Hebrew": "המאיץ עונה ראשון.",
    "Hindi": "त्वरक पहले उत्तर देता है।",
    "Thai": "ตัวเร่งตอบก่อนแล้วจึงเป็นซีพียู",
    "code": "def f(x: int) -> list[str]: return [f'{x:>04}_{i}' for i in range(10**6)]",
    "a link": "see https://example.org/a-b_c?d=e%20f#g or mail to a.b+c@example.org",
    "digits": "0 12 345 6789 1234567890 3.14159e-10 ½ Ⅷ",
    "emoji": "good 👍🏽 family 👨‍👩‍👧 flag 🇩🇪",
    "one letter": "a",
    "a long text": " ".join([ENGLISH] * 30),
}
ODD = {
    "full-width letters": "ＡＢＣ ﬁnd ① ™",
    "loose accents": "e\u0301te\u0301 o\u0308ffnen",
    "a blank before it": " hello",
    "blanks after it": "hello  ",
    "blanks inside it": "a  b   c",
    "lines and tabs": "a\nb\r\n\tc\n\n\nd",
    "blanks alone": "   ",
    "invisible characters": "a\u200bb\u00a0c\ufeffd\x00e\u2028f",
    "names of special tokens": "x [CLS] y [SEP][MASK] z <s> a </s> <mask> <pad> <unk> <bos><eos> <|endoftext|> b",
}
PAIRS = {
    "an English pair": (ENGLISH, "It goes to the CPU."),
    "a Chinese pair": (PLAIN["Chinese"], "去哪里？"),
    "a pair of blanks": (" ", "a "),
}
