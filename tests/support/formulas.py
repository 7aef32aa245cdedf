"""Every formula over plain lists of sequences: float64 NumPy, one sequence and one token at a time.

Written from the papers' definitions and nothing else: no packing, no masks by multiplication, no
code of the package. `m` are masks, one bool array per sequence; other arguments are lists of arrays
of the same lengths, or one number per sequence. d is logp - old.
"""

import numpy as np


def wide(values):
    return [np.asarray(v, np.float64) for v in values]


def members(sequences):
    """Group -> numbers of its sequences that have a token."""
    found = {}
    for i, s in enumerate(sequences):
        if s.mask.any():
            found.setdefault(s.group, []).append(i)
    return found


def on_tokens(sequences, numbers):
    """One number per sequence -> on each of its tokens, 0 where masked."""
    return [np.where(s.mask, x, 0.0) for s, x in zip(sequences, numbers, strict=True)]


def whiten(sequences, values):
    chosen = np.concatenate([v[s.mask] for s, v in zip(sequences, values, strict=True)])
    mean, variance = chosen.mean(), chosen.var(ddof=1)
    return [
        np.where(s.mask, (v - mean) / np.sqrt(variance + 1e-8), 0.0)
        for s, v in zip(sequences, values, strict=True)
    ]


def returns(sequences, reward, gamma=1.0):
    out = []
    for s, r in zip(sequences, wide(reward), strict=True):
        g, total = np.zeros(len(r)), 0.0
        for t in np.flatnonzero(s.mask)[::-1]:
            total = r[t] + gamma * total
            g[t] = total
        out.append(g)
    return out


def scores(sequences, reward):
    return np.array([r[s.mask].sum() for s, r in zip(sequences, wide(reward), strict=True)])


# -- advantages: (sequences, reward, value, baseline, options) -> (advantage, returns) -------------


def gae(sequences, reward, value, baseline, gamma=1.0, lam=1.0):
    advantage, target = [], []
    for s, r, v in zip(sequences, wide(reward), wide(value), strict=True):
        g, ret = np.zeros(len(r)), np.zeros(len(r))
        next_v = next_g = 0.0
        for t in np.flatnonzero(s.mask)[::-1]:
            next_g = r[t] + gamma * next_v - v[t] + gamma * lam * next_g
            next_v = v[t]
            g[t], ret[t] = next_g, next_g + v[t]
        advantage.append(g)
        target.append(ret)
    return whiten(sequences, advantage), target


def _by_group(sequences, reward, of_group):
    """of_group(scores, lengths, alone) -> advantages of the group."""
    s, out = scores(sequences, reward), np.zeros(len(sequences))
    for chosen in members(sequences).values():
        lengths = np.array([sequences[i].length for i in chosen])
        group = s[chosen]
        if len(chosen) > 1 and group.max() == group.min():
            continue
        out[chosen] = of_group(group, lengths, len(chosen) == 1)
    return out


def _outcome(sequences, reward, numbers):
    return on_tokens(sequences, numbers), returns(sequences, reward)


def _minus_mean(s, lengths, alone):
    return s if alone else s - s.mean()


def _z_score(s, lengths, alone):
    return s / (1 + 1e-6) if alone else (s - s.mean()) / (s.std(ddof=1) + 1e-6)


def grpo(sequences, reward, value, baseline):
    return _outcome(sequences, reward, _by_group(sequences, reward, _z_score))


def dr_grpo(sequences, reward, value, baseline):
    return _outcome(sequences, reward, _by_group(sequences, reward, _minus_mean))


def grpo_passk(sequences, reward, value, baseline, norm_adv_by_std_in_grpo=True):
    """The best response's lead over the second best, by sorting each group."""

    def of_group(s, lengths, alone):
        out = np.zeros(len(s))
        if not alone:
            first, second = np.argsort(-s, kind="stable")[:2]
            out[first] = s[first] - s[second]
        return out / (s.std(ddof=1) + 1e-6) if norm_adv_by_std_in_grpo and not alone else out

    return _outcome(sequences, reward, _by_group(sequences, reward, of_group))


def rloo(sequences, reward, value, baseline):
    def of_group(s, lengths, alone):
        return s if alone else [s[i] - np.delete(s, i).mean() for i in range(len(s))]

    return _outcome(sequences, reward, _by_group(sequences, reward, of_group))


def reinforce_plus_plus(sequences, reward, value, baseline, gamma=1.0):
    target = returns(sequences, reward, gamma)
    return whiten(sequences, target), target


def reinforce_plus_plus_baseline(sequences, reward, value, baseline):
    advantage, target = dr_grpo(sequences, reward, value, baseline)
    return whiten(sequences, advantage), target


def remax(sequences, reward, value, baseline):
    target = returns(sequences, reward)
    return [
        np.where(s.mask, g - b, 0.0) for s, g, b in zip(sequences, target, baseline, strict=True)
    ], target


def gpg(sequences, reward, value, baseline):
    s = scores(sequences, reward)
    count = [i for chosen in members(sequences).values() for i in chosen]
    factor = len(count) / max(np.count_nonzero(s[count]), 1)
    numbers = factor * _by_group(sequences, reward, _minus_mean)
    return _outcome(sequences, reward, numbers)


def opo(sequences, reward, value, baseline):
    def of_group(s, lengths, alone):
        return s if alone else s - (lengths * s).sum() / lengths.sum()

    return _outcome(sequences, reward, _by_group(sequences, reward, of_group))


def cpgd_advantage(sequences, reward, value, baseline, cpgd_weight="std"):
    if cpgd_weight == "std":
        return grpo(sequences, reward, value, baseline)
    s, groups = scores(sequences, reward), members(sequences)
    # the standard deviation of a group of one is 1
    differ = sum(len(c) == 1 or s[c].max() > s[c].min() for c in groups.values())
    factor = min(len(groups) / max(differ, 1), 3) if cpgd_weight == "clip_filter" else 1.0
    numbers = factor * _by_group(sequences, reward, _minus_mean)
    return _outcome(sequences, reward, numbers)


# -- policy losses: per token of one sequence ------------------------------------------------------
# (live, held, old, a, chosen, options): `live` is logp where a gradient flows, `held` the same
# number where the formula stops it; all arrays hold the unmasked tokens of one sequence only


def _ppo(r, a, low, high, dual):
    out = []
    for ratio, adv in zip(r, a, strict=True):
        x = max(-adv * ratio, -adv * min(max(ratio, 1 - low), 1 + high))
        out.append(min(x, -adv * dual) if adv < 0 and dual is not None else x)
    return np.array(out)


def ppo_clip(live, held, old, a, chosen, clip_low=0.2, clip_high=0.2, dual_clip=3.0):
    return _ppo(np.exp(live - old), a, clip_low, clip_high, dual_clip)


def gspo(live, held, old, a, chosen, clip_low=3e-4, clip_high=4e-4, dual_clip=None):
    log_s = min((held - old).mean(), 10.0)
    return _ppo(np.exp(log_s + live - held), a, clip_low, clip_high, dual_clip)


def cispo(live, held, old, a, chosen, clip_low=0.2, clip_high=0.2):
    return -np.clip(np.exp(held - old), 1 - clip_low, 1 + clip_high) * a * live


def sapo(live, held, old, a, chosen, sapo_tau_positive=1.0, sapo_tau_negative=1.05):
    tau = np.where(a > 0, sapo_tau_positive, sapo_tau_negative)
    return -a * 4 / tau / (1 + np.exp(-tau * (np.exp(live - old) - 1)))


def gmpo(live, held, old, a, chosen, clip_low=0.4, clip_high=0.4):
    d, sign = live - old, np.sign(a)
    q = sign * np.minimum(sign * d, sign * np.clip(d, -clip_low, clip_high))
    return np.full(len(d), -a.mean() * np.exp(q.mean()))


def gpg_loss(live, held, old, a, chosen):
    return -live * a


def cpgd(live, held, old, a, chosen, clip_low=0.2, clip_high=0.2, cpgd_drift_coef=1e-3):
    u = np.where(
        a > 0,
        np.minimum(live, old + np.log(1 + clip_high)),
        np.maximum(live, old + np.log(1 - clip_low)),
    )
    return -u * a + cpgd_drift_coef * np.minimum(np.exp(held - old) - 1, 2) * live


def kl_cov(live, held, old, a, chosen, kl_cov_coef=1.0):
    return -a * np.exp(live - old) + np.where(chosen, kl_cov_coef * np.abs(live - old), 0.0)


def clip_cov(live, held, old, a, chosen, clip_low=0.2, clip_high=0.2):
    return np.where(chosen, 0.0, _ppo(np.exp(live - old), a, clip_low, clip_high, None))


def _dppo(live, held, old, a, far_up, far_down, largest):
    loss = -a * np.minimum(np.exp(held - old), largest) * live
    return np.where(np.where(a > 0, far_up, far_down), 0.0, loss)


def dppo_tv(live, held, old, a, chosen, clip_low=0.15, clip_high=0.15, dual_clip=20.0):
    rise = np.exp(held) - np.exp(old)
    return _dppo(live, held, old, a, rise > clip_high, -rise > clip_low, dual_clip)


def dppo_kl(live, held, old, a, chosen, clip_low=0.05, clip_high=0.05, dual_clip=20.0):
    p, q = np.exp(held), np.exp(old)
    kl = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    up, down = (kl > clip_high) & (p > q), (kl > clip_low) & (p < q)
    return _dppo(live, held, old, a, up, down, dual_clip)


def dro(live, held, old, a, chosen, dro_beta=0.05):
    return -(live * a - dro_beta / 2 * (live - old) ** 2)


def decoupled(live, held, old, a, chosen, clip_low=0.2, clip_high=0.2):
    u = np.exp(live - old)
    return -np.minimum(u * a, np.clip(u, 1 - clip_low, 1 + clip_high) * a)


def covariances(sequences, a, logp):
    """(A - mean A)(logp - mean logp) of each token, with means over all unmasked tokens."""
    all_a, all_logp = (
        np.concatenate([x[s.mask] for s, x in zip(sequences, values, strict=True)])
        for values in (a, logp)
    )
    return [(x - all_a.mean()) * (y - all_logp.mean()) for x, y in zip(a, logp, strict=True)]


def covariance_within(sequences, a, logp, old, low, high, clip=0.2):
    """Tokens that clip_cov may choose: a covariance between the bounds, and not clipped already."""
    chosen = []
    for s, x, y, o, c in zip(sequences, a, logp, old, covariances(sequences, a, logp), strict=True):
        ratio = np.exp(y - o)
        clipped = -x * np.clip(ratio, 1 - clip, 1 + clip) > -x * ratio
        chosen.append(s.mask & (c > low) & (c < high) & ~clipped)
    return chosen


def largest_covariance(sequences, a, logp, share):
    """Tokens that kl_cov holds: the first max(1, floor(share N)) by the covariance, the largest
    first, then by (group, sample, place in the response)."""
    places = sorted(
        (-c[t], s.group, s.sample, t, i)
        for i, (s, c) in enumerate(zip(sequences, covariances(sequences, a, logp), strict=True))
        for t in np.flatnonzero(s.mask)
    )
    chosen = [np.zeros(len(s.mask), bool) for s in sequences]
    for *_, t, i in places[: max(1, int(share * len(places)))]:
        chosen[i][t] = True
    return chosen


# -- KL, corrections -------------------------------------------------------------------------------

KL = {
    "k1": lambda live, held, ref: live - ref,
    "abs": lambda live, held, ref: np.abs(live - ref),
    "k2": lambda live, held, ref: (live - ref) ** 2 / 2,
    "k3": lambda live, held, ref: np.clip(np.exp(ref - live) + live - ref - 1, -10, 10),
    # the value is k1's, or k3's; from live - held comes the gradient of k2
    "k1+": lambda live, held, ref: held - ref + ((live - ref) ** 2 - (held - ref) ** 2) / 2,
    "k3+": lambda live, held, ref: (
        np.clip(np.exp(ref - held) + held - ref - 1, -10, 10)
        + ((live - ref) ** 2 - (held - ref) ** 2) / 2
    ),
}


def correction(name, log_rho, low=None, high=None):
    """Weights of one sequence's unmasked tokens."""
    rho, n = np.exp(log_rho), len(log_rho)
    product, mean = np.exp(log_rho.sum()), log_rho.mean()
    k2, k3 = log_rho**2 / 2, rho - 1 - log_rho
    return {
        "none": lambda: np.ones(n),
        "token_tis": lambda: np.minimum(rho, high),
        "token_mis": lambda: np.where((rho >= low) & (rho <= high), rho, 0.0),
        "sequence_tis": lambda: np.full(n, min(product, high)),
        "sequence_mis": lambda: np.full(n, product if low <= product <= high else 0.0),
        "geometric": lambda: np.full(n, float(low <= np.exp(mean) <= high)),
        "k2": lambda: np.full(n, float(k2.mean() <= high)),
        "k3": lambda: np.full(n, float(k3.mean() <= high)),
        "token_k1": lambda: ((np.log(low) <= log_rho) & (log_rho <= np.log(high))).astype(float),
        "token_k2": lambda: (k2 <= high).astype(float),
        "token_k3": lambda: (k3 <= high).astype(float),
        "seq_sum_k1": lambda: np.full(n, float(low <= product <= high)),
        "seq_sum_k2": lambda: np.full(n, float(k2.sum() <= high)),
        "seq_sum_k3": lambda: np.full(n, float(k3.sum() <= high)),
        "seq_max_k2": lambda: np.full(n, float(k2.max() <= high)),
        "seq_max_k3": lambda: np.full(n, float(k3.max() <= high)),
    }[name]()


def normalised(weights, of_sequences):
    """Weights of all sequences, divided by their mean over tokens, or over sequences."""
    kept = [w for w in weights if len(w)]
    mean = np.mean([w.mean() for w in kept]) if of_sequences else np.concatenate(kept).mean()
    return [w / mean for w in weights]


def off_policy(trainer, sampler):
    """verl's off-policy metrics, of lists with the log-probs of each sequence's unmasked tokens."""
    pairs = [(t, s) for t, s in zip(trainer, sampler, strict=True) if len(t)]
    rho = np.exp(np.concatenate([t - s for t, s in pairs]))
    ppl = np.array([[np.exp(-x.mean()) for x in pair] for pair in pairs])
    products = np.array([np.exp((t - s).sum()) for t, s in pairs])
    difference = np.log(ppl[:, 0]) - np.log(ppl[:, 1])
    return {
        "kl": -np.log(rho).mean(),
        "k3_kl": (rho - 1 - np.log(rho)).mean(),
        "reverse_kl": (rho * np.log(rho) - rho + 1).mean(),
        "chi2_token": (rho**2).mean() - 1,
        "chi2_seq": (products**2).mean() - 1,
        "training_ppl": ppl[:, 0].mean(),
        "rollout_ppl": ppl[:, 1].mean(),
        "training_log_ppl": np.log(ppl[:, 0]).mean(),
        "rollout_log_ppl": np.log(ppl[:, 1]).mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": np.abs(difference).mean(),
        "log_ppl_diff_max": difference.max(),
        "ppl_ratio": (ppl[:, 0] / ppl[:, 1]).mean(),
    }


# -- aggregation: per-token values of each sequence, of its unmasked tokens ------------------------


def aggregate(mode, sequences, values, norm=1.0, budget=0):
    pairs = [(s, np.asarray(v)) for s, v in zip(sequences, values, strict=True) if s.mask.any()]
    if mode == "fixed-budget":
        ordered = sorted(pairs, key=lambda p: (p[0].group, p[0].sample))
        return np.concatenate([v for _, v in ordered])[:budget].sum() / budget
    kept = [v for _, v in pairs]
    return {
        "token-mean": lambda: np.concatenate(kept).mean(),
        "token-sum": lambda: np.concatenate(kept).sum(),
        "seq-mean-token-sum": lambda: np.mean([v.sum() for v in kept]),
        "seq-mean-token-mean": lambda: np.mean([v.mean() for v in kept]),
        "seq-mean-token-sum-norm": lambda: np.mean([v.sum() for v in kept]) / norm,
    }[mode]()


def gradient(function, x, step=1e-6):
    """Central differences of a scalar function of a vector."""
    out = np.zeros(len(x))
    for i in range(len(x)):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        out[i] = (function(up) - function(down)) / (2 * step)
    return out
