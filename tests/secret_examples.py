"""Secrets by the tables of `the reports of secrets`, none of them real, and words that only look like some."""

from __future__ import annotations

LONG = "Ab3dE6gH9" * 10

OF_A_FORM = {
    "a token of the Hugging Face hub": [f"hf_{LONG[:34]}"],
    "an API key (sk-...)": [
        f"sk-{LONG[:48]}",
        f"sk-proj-{LONG[:30]}_x-{LONG[:9]}",
        "sk-lf-d04f2e11-8c55-4a51-9d4b-0e4f2b8f0a52",
    ],
    "an API key of a model's provider": [f"gsk_{LONG[:52]}", f"nvapi-{LONG[:64]}"],
    "a token of GitHub": [f"ghp_{LONG[:36]}", f"github_pat_{LONG[:22]}_{LONG[:59]}"],
    "a token of GitLab": [f"glpat-{LONG[:20]}"],
    "a token of Slack": [f"xoxb-1234567890-{LONG[:24]}"],
    "an access key of AWS": ["AKIA" + "Q3EGR7T2" * 2],
    "an API key of Google": [f"AIza{LONG[:35]}"],
    "a key of Stripe": [f"sk_live_{LONG[:24]}"],
    "a JSON web token": [f"eyJ{LONG[:17]}.eyJ{LONG[:30]}.{LONG[:43]}"],
    "a key of W&B": [f"wandb_v1_{LONG[:40]}", "local-" + "0a1b2c3d" * 5],
    "a password in an address": ["https://ann:geheim1@host/v1", "postgres://ann:geheim1@host:5432/db"],
    "a token in an address": [f"https://{LONG[:36]}@host/ann/repository"],
    "a key in the query of an address": [
        *(f"https://h/score?{name}=geheim1" for name in ("key", "api_key", "sig", "signature", "token")),
        *(
            "https://h/x?access_token=geheim1",
            "https://h/x?a=b&X-Amz-Signature=geheim1",
            "https://h/x?X-Amz-Security-Token=geheim1&b=c",
        ),
    ],
    "a Bearer token": ["Bearer abcdefghijklmnop1234"],
    "a password of HTTP's Basic": ["Basic YW5uOmdlaGVpbTE="],
    "a header of HTTP": ["Authorization: Token geheim1", "X-Auth-Key: geheim1"],
    "a private key": [
        "-----BEGIN RSA PRIVATE KEY-----\ngeheim1\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----",
    ],
}
"""By their names in the tables."""

OF_A_NAME = [
    *("api_token", "GITHUB_TOKEN", "apiKey", "hf_token", "AWS_SECRET_ACCESS_KEY", "client_secret", "credentials"),
    *("X-Auth", "X-Auth-Token", "x-api-key", "Proxy-Authorization", "Set-Cookie", "DB_PASS", "pass", "api_tokens"),
]
"""Keys beside those that the table names as they are."""

HARMLESS = [
    *("sampling.max_new_tokens=6", "data.max_prompt_tokens=null", "callbacks.token_samples.every=3", "a.tokens=100"),
    *("model.tokenizer=org/tokenizer", "model.name=org/sk-model", "model.name=sk-learn-experiments-of-a-long-name"),
    *("model.name=org/sk-learn-experiments-of-a-long-name", "model.pad_token=endoftext", "model.eos_token=<|im_end|>"),
    *("data.path=keys.jsonl", "data.prompt_key=key", "data.key=password", "data.columns.key=token", "x.keys=secret"),
    *("sampling.bad_words=[token,secret,password]", "judge.key_env=MY_KEY", "judge.api_key_env=MY_KEY"),
    *("judge.api_key=null", "judge.token='${oc.env:MY_TOKEN}'", "judge.token='${oc.env:MY_TOKEN,null}'"),
    *("judge.api_key=OPENAI_API_KEY", "model.revision=" + "d04f2e11" * 5, "reward.url=http://127.0.0.1:8000/score?k=1"),
    *("data.path=hf://datasets/a/b@main/x.jsonl", "reward.url='https://${oc.env:USER}:${oc.env:PW}@host/v1'"),
    *(
        "reward.url='https://h/score?key=${oc.env:KEY}'",
        "h.Authorization='Bearer ${oc.env:KEY}'",
        "a.first_pass=greedy",
    ),
    *("a.text='Basic understanding of internationalization. Bearer of news; the token, or a secret password: 1'",),
    *("a.text='AKIA and eyJ are no more than prefixes, as sk-, hf_x and ghp_ are'", "judge.author=ann", "a.bypass=x"),
    *("model.load_kwargs.token=true", "logger.wandb.entity=local-team", "loss=token_mean", "a.password=null"),
]
"""Words of a command line, each as Hydra reads it."""
