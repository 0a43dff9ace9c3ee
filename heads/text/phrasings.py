"""How users ask: phrasings of each kind of prompt, follow-up turns, system messages. A list's first one comes most."""

TRANSLATE = (
    "Translate {source} to {target}: {text}",
    "Translate this {source} text into {target}:\n\n{text}",
    "{text}\n\nTranslate this into {target}.",
    "Please translate the following from {source} into {target}, keeping its tone:\n{text}",
    "How would you say this in {target}?\n\n{text}",
    "{source}: {text}\n{target}:",
    "Give me a translation of this text into {target}. Only the translation, please.\n\n{text}",
    'What does this {source} text say in {target}? "{text}"',
    "I need this in {target}: {text}",
    "Rewrite in {target}:\n\n{text}",
)
TRANSLATE_TO_ENGLISH = {
    "de": ("Übersetze ins Englische: {text}", "Wie lautet das auf Englisch?\n\n{text}"),
    "fr": ("Traduis en anglais : {text}", "Comment dit-on cela en anglais ?\n\n{text}"),
    "es": ("Traduce al inglés: {text}", "¿Cómo se dice esto en inglés?\n\n{text}"),
    "it": ("Traduci in inglese: {text}", "Come si dice in inglese?\n\n{text}"),
    "pt_BR": ("Traduza para o inglês: {text}",),
    "pl": ("Przetłumacz na angielski: {text}",),
    "ru": ("Переведи на английский: {text}",),
    "ja": ("英語に翻訳してください：{text}",),  # noqa: RUF001
    "zh_CN": ("请翻译成英文：{text}",),  # noqa: RUF001
}
SUMMARIZE = (
    "Summarize: {text}",
    "Summarize the following text in three sentences.\n\n{text}",
    "{text}\n\nTL;DR",
    "Give a short summary of this passage:\n\n{text}",
    "Say in one sentence what this text is about.\n\n{text}",
    "List the key points of the following text as bullet points.\n\n{text}",
    "{text}\n\nWhat are the main points of the text above?",
    "Write a headline and a summary of two sentences for this text:\n\n{text}",
    "Summarize this for a reader who is in a hurry:\n\n{text}",
    "Sum up the text below in at most 60 words.\n\n{text}",
    "Explain in simple words what the following says.\n\n{text}",
    "Text: {text}\n\nSummary:",
    "Condense this into one paragraph:\n\n{text}",
)
SUMMARIZE_IN = {
    "de": ("Fasse den Text zusammen:\n\n{text}", "Worum geht es in diesem Text?\n\n{text}"),
    "fr": ("Résume ce texte :\n\n{text}", "De quoi parle ce texte ?\n\n{text}"),
    "es": ("Resume el siguiente texto:\n\n{text}", "¿De qué trata este texto?\n\n{text}"),
    "it": ("Riassumi questo testo:\n\n{text}",),
    "pt_BR": ("Resuma o texto a seguir:\n\n{text}",),
}
RETRIEVE = (
    "{passages}\n\n{question}",
    "Answer the question from the passages below.\n\n{passages}\n\nQuestion: {question}\nAnswer:",
    "Context:\n{passages}\n\nQuestion: {question}",
    "Use only the following documents to answer. If the answer is not in them, say so.\n\n{passages}\n\n{question}",
    "{question}\n\nHere is what I found:\n\n{passages}",
    "Question: {question}\n\nSearch results:\n{passages}\n\nAnswer in one or two sentences.",
    "I searched the manuals and got these results:\n\n{passages}\n\nBased on them: {question}",
    "Read the passages, answer briefly and quote the sentence that your answer rests on.\n\n{passages}\n\n{question}",
)
QUESTIONS = {  # by source; {title}: a passage's heading, {name}: what stands before its colon
    "package descriptions": (
        "What is {name} for?",
        "Which package would you install for this: {about}?",
        "What can I do with {name}?",
        "Who would want to use {name}, and why?",
    ),
    "dict-foldoc": ("What is {title}?", 'What does the term "{title}" mean?', "Explain {title} in two sentences."),
    "dict-jargon": ('What do hackers mean by "{title}"?', 'Where does the term "{title}" come from?'),
    "endless-sky-data": (
        "Who speaks in this scene, and what do they want?",
        "What is the captain asked to do?",
        "Where does this take place?",
        "How does the scene end?",
        "Why are the people in this scene in trouble?",
    ),
    "stellarium-data": (
        "What is told about {title}?",
        "What is special about this sky culture?",
        "Who told these stories?",
    ),
    "instructions": (
        "What happened, and when?",
        "Who is the text mainly about?",
        "Which places are named?",
        "Why did this happen?",
        "What is the most important fact in it?",
        "Which numbers or dates are given, and what do they stand for?",
    ),
    "": (  # manuals
        "What should I know about {title}?",
        "What do the texts say about {title}?",
        "Explain {title}.",
        "What is meant by {title}, and when do I need it?",
        "Which steps are needed here: {title}?",
    ),
}
HOW = "How do I {title}?"  # headings that begin with a verb
VERBS = set(
    "add adjust allow avoid backup build burn calibrate change check choose close configure connect "
    "control copy create customize display delete disable disconnect edit enable enter export find fix "
    "format get import install keep log make manage modify mount move open play preview print protect "
    "recover remove rename reset resize restore rotate run save search select send set share sort start "
    "stop switch take test turn type unlock update upgrade use verify view write".split()
)
DOCUMENT = (  # long contexts
    "{text}\n\nSummarize the document above, section by section.",
    "Here is a part of a document.\n\n{text}\n\nWhat are the five most important statements in it?",
    "{text}\n\nWrite a table of contents for this text, with one line on each part.",
    "Read this carefully:\n\n{text}\n\nWrite five questions that it answers, each with its answer.",
    "{text}\n\nRewrite the first part so that a beginner understands it.",
    "I have to present this to my team:\n\n{text}\n\nWrite an outline of my talk.",
    "{text}\n\nWhich terms does the text use that a newcomer may not know? Explain each in a sentence.",
    "Document:\n\n{text}\n\nWrite an abstract of about 100 words.",
    "{text}\n\nWhat is missing or unclear in this text?",
    "{text}\n\nTurn this into a checklist.",
    "{text}\n\nWrite an e-mail to a colleague that tells what is in here, and why it matters to them.",
    "{text}\n\nWhat does it say about {title}?",
)
TALK = {  # follow-up turns, by what the first one was
    "code": (
        "Can you explain how it works, step by step?",
        "Add comments and type hints.",
        "Write tests for it.",
        "What is its time and space complexity?",
        "Now handle invalid input.",
        "Can you make it shorter?",
        "Rewrite it in another language of your choice.",
        "Which edge cases would break it?",
        "Show an example of how it is used.",
    ),
    "math": (
        "Explain the second step again.",
        "How can I check that the answer is right?",
        "Solve it in another way.",
        "What if all the numbers were twice as large?",
        "Give only the final answer.",
        "Write a similar problem and solve it.",
        "Write this as a Python program.",
    ),
    "writing": (
        "Make it shorter.",
        "Rewrite it in a more formal tone.",
        "Now tell it from another person's point of view.",
        "Add a surprising end.",
        "Translate it into German.",
        "Give it a title, and say why you chose it.",
        "Rewrite it as a dialogue.",
        "What would you improve in your text?",
    ),
    "general": (
        "Can you give an example?",
        "Why?",
        "Tell me more about the last point.",
        "Say that again, in simpler words.",
        "What are the arguments against it?",
        "Put your answer into a table.",
        "Sum up our conversation in two sentences.",
        "Are you sure? Check your answer.",
    ),
    "passage": (
        "Now in a single sentence.",
        "Translate your answer into {language}.",
        "Which sentence of the text supports that best?",
        "Write three questions that the text answers.",
        "Who would want to read this text?",
        "Rewrite the text as a list.",
        "What follows from it in practice?",
    ),
    "translation": (
        "Make it more formal.",
        "Now translate it into {language}.",
        "Which words were hard to translate, and why?",
        "Give another translation that stays closer to the original.",
        "Explain the grammar of the first sentence.",
        "Shorten it.",
    ),
}
ASK, ANSWER = "Write three questions that the text answers.", "Answer them one by one, briefly."  # a turn and the next
SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Answer in one short paragraph.",
    "You are a careful editor. Be precise and do not add anything that the text does not say.",
    "You are a professional translator and technical writer.",
    "You are an experienced Linux system administrator who helps beginners patiently.",
    "You are a senior software engineer. Prefer simple solutions and show code where it helps.",
    "You are a teacher. Explain things step by step, with an example.",
    "Answer as a friendly librarian would.",
    "You answer questions about documents. Rely only on what the user gives you; if it is not enough, say so.",
    "Format your answers in Markdown, with headings where they help.",
    "Use plain text only: no Markdown, no lists.",
    "Always answer with a bulleted list.",
    'Answer in JSON with the keys "answer" and "reason".',
    "You are an assistant in a customer support chat. Be polite, and end with a question that helps to go on.",
    "You are a pirate captain. Stay in character.",
    "You are a news editor who writes short, neutral sentences.",
    "You are Ada, the assistant of a small library. Today is a Tuesday in October.",
    'Think about the question first, then write your answer behind the word "Answer:".',
    "Respond in the language of the user's message.",
    "Always answer in German.",
    "Réponds toujours en français.",
    "Answer in English, whatever the language of the question.",
    "You write for children of ten years. Use short sentences.",
    "You are an expert who reviews texts critically. Name strengths before weaknesses.",
    "Keep answers under 50 words.",
    "You are a research assistant. Give your confidence (low, medium, high) at the end of each answer.",
    "You are a poet and like comparisons, but your facts are right.",
    "You are a strict examiner.",
    "You help people who learn English: explain rare words in brackets.",
)
