"""Fifty texts of all kinds: English, Chinese, emoji, code, mixed scripts; from one word to two thousand."""

ENGLISH = [
    "hello",
    "a",
    "Where does the overflow go?",
    "The accelerator answers first; the CPU takes what it cannot.",
    "Retrieval-augmented generation looks up passages before the model writes a word.",
    "It was the best of times, it was the worst of times.",
    "SLO",
    "3.14159 26535 89793",
    "I can't, won't, and shouldn't've.",
    "naïve café coöperate résumé",
    "UPPER CASE AND lower case AND MiXeD",
    "def embed(queries): return [model(query) for query in queries]",
    "SELECT id, text FROM passages WHERE score > 0.8 ORDER BY score DESC;",
    "https://example.org/a/b?c=d&e=f#g",
    "e-mail: someone@example.org, phone: +49 30 1234567",
    "   leading and trailing spaces   ",
    "tabs\tand\nnew\nlines",
    "?!?!?! ... ---",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "The quick brown fox jumps over the lazy dog. " * 3,
]
CHINESE = [
    "你好",
    "人工智能正在改变世界。",
    "向量嵌入把文本变成数字，使语义相近的句子彼此靠近。",
    "昇腾处理器满载时，旁边的鲲鹏处理器还很空闲。",
    "检索增强生成需要在每次请求时调用嵌入模型，高峰期的并发数决定了部署成本。",
    "北京、上海、广州、深圳",
    "今天天气怎么样？",
    "窗前明月光，疑是地上霜。举头望明月，低头思故乡。",
    "中英文 mixed text 在一句话里。",
    "队列深度" * 30,
]
EMOJI = ["😀", "🎉🎊🥳 party time 🎈", "I ❤️ embeddings", "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb", "🚀" * 40]
OTHER = [
    "Привет, как дела?",
    "こんにちは、世界",
    "안녕하세요 세계",
    "مرحبا بالعالم",
    "שלום עולם",
    "Γειά σου Κόσμε",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
]
LONG = [
    " ".join(f"word{number}" for number in range(50)),
    " ".join(f"term {number} of the list" for number in range(60)),
    "A passage on queues. " * 40,
    "每个设备都有一个队列。" * 40,
    " ".join(["the", "cat", "sat", "on", "the", "mat", "and", "looked", "at", "the", "moon"] * 20),
    " ".join(str(number) for number in range(500)),
    " ".join(f"w{number % 97}" for number in range(2000)),
]
TEXTS = [*ENGLISH, *CHINESE, *EMOJI, *OTHER, *LONG]
assert len(TEXTS) == len(set(TEXTS)) == 50
