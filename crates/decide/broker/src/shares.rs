//! How the memory of one node is divided among harvest VMs: in proportion to their minimum sizes,
//! capped by their maxima (section 4.4 of the paper, "Multiple MHVMs per server").

/// One that takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    /// Its minimum size.
    pub(crate) weight: u64,
    /// The most that it can have.
    pub(crate) cap_bytes: u64,
    /// Unit of its part.
    pub(crate) block_bytes: u64,
}

/// Returns the parts, together no more than `pool_bytes`. Bytes that one claim cannot take go to
/// the others, in proportion too. Bytes left by rounding are given out in blocks, in the order of
/// the claims.
pub(crate) fn divide(pool_bytes: u64, claims: &[Claim]) -> Vec<u64> {
    let weight = |claim: &Claim| u128::from(claim.weight.max(1));
    let mut order: Vec<usize> = (0..claims.len()).collect();
    // Those first that will be full first.
    order.sort_by(|&a, &b| {
        let (a_full, b_full) = (
            u128::from(claims[a].cap_bytes) * weight(&claims[b]),
            u128::from(claims[b].cap_bytes) * weight(&claims[a]),
        );
        a_full.cmp(&b_full).then(a.cmp(&b))
    });
    let mut parts = vec![0; claims.len()];
    let mut weights: u128 = claims.iter().map(weight).sum();
    let mut left = pool_bytes;
    for &at in &order {
        let claim = &claims[at];
        let part = (u128::from(left) * weight(claim) / weights) as u64;
        weights -= weight(claim);
        parts[at] = part.min(claim.cap_bytes);
        left -= parts[at];
    }
    for (part, claim) in parts.iter_mut().zip(claims) {
        left += *part % claim.block_bytes;
        *part -= *part % claim.block_bytes;
    }
    for (part, claim) in parts.iter_mut().zip(claims) {
        if left >= claim.block_bytes && *part + claim.block_bytes <= claim.cap_bytes {
            *part += claim.block_bytes;
            left -= claim.block_bytes;
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const G: u64 = 1 << 30;

    fn claim(weight: u64, cap: u64) -> Claim {
        Claim { weight: weight * G, cap_bytes: cap * G, block_bytes: 2 << 20 }
    }

    #[test]
    fn twice_the_minimum_has_twice_the_part() {
        assert_eq!(divide(30 * G, &[claim(32, 96), claim(16, 96)]), [20 * G, 10 * G]);
        assert_eq!(divide(30 * G, &[claim(32, 5), claim(16, 96)]), [5 * G, 25 * G]);
        assert_eq!(divide(30 * G, &[claim(32, 5), claim(16, 6)]), [5 * G, 6 * G]);
        assert_eq!(divide(0, &[claim(32, 5)]), [0]);
        assert!(divide(7, &[]).is_empty());
    }

    proptest! {
        #[test]
        fn parts_are_fair_and_use_what_there_is(
            pool in 0u64..2000,
            claims in prop::collection::vec((1u64..20, 0u64..600, 0u32..4), 1..8),
        ) {
            let claims: Vec<Claim> = claims
                .into_iter()
                .map(|(weight, cap, order)| Claim {
                    weight,
                    cap_bytes: cap >> order << order,
                    block_bytes: 1 << order,
                })
                .collect();
            let parts = divide(pool, &claims);
            let sum: u64 = parts.iter().sum();
            prop_assert!(sum <= pool);
            for (part, claim) in parts.iter().zip(&claims) {
                prop_assert!(*part <= claim.cap_bytes && part % claim.block_bytes == 0);
            }
            // Nothing is left that anybody could have taken whole.
            for (part, claim) in parts.iter().zip(&claims) {
                let is_full = *part == claim.cap_bytes;
                prop_assert!(is_full || pool - sum < claims.iter().map(|c| c.block_bytes).sum());
            }
            // A claim below its cap has no less for its weight than any other, but for the blocks.
            for (mine, claim) in parts.iter().zip(&claims) {
                for (other, its) in parts.iter().zip(&claims) {
                    if *mine < claim.cap_bytes {
                        let my_level = (*mine + 2 * claim.block_bytes) as f64 / claim.weight as f64;
                        let its_level = other.saturating_sub(2 * its.block_bytes) as f64;
                        let slack = 20.0 / claim.weight as f64;
                        prop_assert!(my_level + slack >= its_level / its.weight as f64);
                    }
                }
            }
        }
    }
}
