"""A llama-shaped decoder over a key-value cache, in 30 lines, and prompts that it continues, two at a time."""

import opweave as ow

LETTERS, PROMPTS = "abcdefghijklmnopqrstuvwxyz .,!?", ("once upon a time", "hello, ", "why?")
LAYERS, WIDTH, HEADS, GROUPS, SIZE, HIDDEN = 4, 256, 8, 2, 32, 688
SHAPES = {"q": (WIDTH, WIDTH), "k": (GROUPS * SIZE, WIDTH), "v": (GROUPS * SIZE, WIDTH), "o": (WIDTH, WIDTH),
          "gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}  # fmt: skip
SHAPES = {f"{i}.{n}": s for i in range(LAYERS) for n, s in SHAPES.items()} | {"words": (len(LETTERS), WIDTH)}


def decoder(arrays, devices, sequences=2, capacity=256, dtype="f32", **paging):
    shared = [devices[i * len(devices) // LAYERS] for i in range(LAYERS)]
    w = ow.weights(arrays, {f"{i}.*": device for i, device in enumerate(shared)})
    cache = ow.KVCache(LAYERS, sequences, capacity, GROUPS, SIZE, dtype, device=shared, **paging)

    @ow.compile(devices=[*devices, "host"])  # host computes only what the others do not
    def step(tokens, positions, slots, blocks, last, reach):
        x = ow.embedding(w["words"], tokens)
        for i in range(LAYERS):
            with ow.scope(f"layer{i}"):
                h = ow.rms_norm(x)
                q, k, v = (ow.linear(h, w[f"{i}.{n}"]).reshape(*x.shape[:2], -1, SIZE) for n in "qkv")
                q, k, v = (y.transpose(0, 2, 1, 3) for y in (q, k, v))
                q, k = (ow.rope(y, ow.expand_dims(positions, 1), pairing="half") for y in (q, k))
                mixed = cache.attend(i, q, k, v, positions, slots, blocks, reach)
                x = x + ow.linear(mixed.transpose(0, 2, 1, 3).reshape(x.shape), w[f"{i}.o"])
                inner = ow.swiglu(*(ow.linear(ow.rms_norm(x), w[f"{i}.{n}"]) for n in ("up", "gate")))
                x = x + ow.linear(inner, w[f"{i}.down"])
        return ow.linear(ow.rms_norm(ow.embedding(x.reshape(-1, WIDTH), last)), w["words"])

    return step, cache


def continued(prompts, length, step, cache):
    """Yields each prompt, continued to so many letters; the next one joins as soon as a sequence has left."""
    waiting, texts = list(prompts), {}
    while waiting or texts:
        while waiting and len(texts) < len(cache.lengths):
            texts[cache.join()] = waiting.pop(0)
        new = {sequence: text[cache.lengths[sequence] :] for sequence, text in texts.items()}
        batch = cache.feed({sequence: [LETTERS.index(letter) for letter in text] for sequence, text in new.items()})
        best = step(*batch).argmax(-1)
        texts = {sequence: text + LETTERS[best[batch.rows[sequence]]] for sequence, text in texts.items()}
        for sequence in [sequence for sequence, text in texts.items() if len(text) == length]:
            cache.release(sequence)
            yield texts.pop(sequence)
