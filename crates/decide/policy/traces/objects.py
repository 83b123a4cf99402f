"""A Python program heavy in dicts and lists, for traces/record.sh: an index of words, skewed
lookups, a pass over everything now and then, and a second phase on other data."""

import random

random.seed(1)
words = [f"word-{number:06x}" for number in range(24000)]
index = {word: [number] for number, word in enumerate(words)}
total = 0
for round_number in range(4):
    for _ in range(12000):
        word = words[min(int(random.expovariate(1 / 2000)), len(words) - 1)]
        index[word].append(round_number)
    total += sum(len(entries) for entries in index.values())

del index
records = [{"id": number, "tags": (number, str(number))} for number in range(24000)]
random.shuffle(records)
for _ in range(3):
    records.sort(key=lambda record: record["tags"][1])
    records.sort(key=lambda record: record["id"] % 997)
print(total, len(records))
