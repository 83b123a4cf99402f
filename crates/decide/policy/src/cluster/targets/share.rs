//! Arithmetic of dividing: in proportion, and max-min fair.

/// Scales `shares` down in proportion until their sum is within `total` (the paper's equation 2,
/// rounded down). Shares that fit are left alone.
pub fn scale_to_fit(shares: &mut [u64], total: u64) {
    let sum: u128 = shares.iter().map(|&share| u128::from(share)).sum();
    if sum > u128::from(total) {
        for share in shares {
            *share = (u128::from(*share) * u128::from(total) / sum) as u64;
        }
    }
}

/// Divides `total` max-min fairly. No share exceeds its `bid`, or the share of another bidder that
/// is left below its bid. But each bidder first gets its `floor` (or its bid, if that is less).
/// Floors that do not fit are scaled down. Pages that no bid covers are left over. Both slices
/// are of one length; `shares` is overwritten. Time: 64 passes over the bids at most, no sorting
/// and no memory.
pub fn max_min(total: u64, floors: &[u64], bids: &[u64], shares: &mut Vec<u64>) {
    assert_eq!(floors.len(), bids.len(), "one floor for each bid");
    let at_level = |level: u64, at: usize| level.clamp(floors[at].min(bids[at]), bids[at]);
    let sum_at =
        |level: u64| (0..bids.len()).map(|at| u128::from(at_level(level, at))).sum::<u128>();
    shares.clear();
    if sum_at(0) > u128::from(total) {
        shares.extend((0..bids.len()).map(|at| at_level(0, at)));
        scale_to_fit(shares, total);
        return;
    }
    // The highest level that fits.
    let highest_bid = bids.iter().copied().max().unwrap_or(0);
    let (mut fits, mut above) = (0, highest_bid.saturating_add(1));
    if sum_at(highest_bid) <= u128::from(total) {
        fits = highest_bid;
    } else {
        while above - fits > 1 {
            let middle = fits + (above - fits) / 2;
            if sum_at(middle) <= u128::from(total) {
                fits = middle;
            } else {
                above = middle;
            }
        }
    }
    shares.extend((0..bids.len()).map(|at| at_level(fits, at)));
    // Fewer pages than there are bidders at the level: one each, to the first ones.
    let mut left = total - shares.iter().sum::<u64>();
    for (share, &bid) in shares.iter_mut().zip(bids) {
        if left > 0 && *share == fits && bid > fits {
            *share += 1;
            left -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn equation_2_keeps_the_proportions() {
        let mut shares = [300, 100, 200];
        scale_to_fit(&mut shares, 300);
        assert_eq!(shares, [150, 50, 100]);
        scale_to_fit(&mut shares, 1000);
        assert_eq!(shares, [150, 50, 100]);
    }

    #[test]
    fn small_bids_are_met_and_the_rest_share_what_is_left() {
        let mut shares = Vec::new();
        max_min(100, &[0; 4], &[10, 90, 90, 20], &mut shares);
        assert_eq!(shares, [10, 35, 35, 20]);
        max_min(101, &[0; 4], &[10, 90, 90, 20], &mut shares);
        assert_eq!(shares, [10, 36, 35, 20]);
        max_min(100, &[0, 60, 0, 0], &[10, 90, 90, 20], &mut shares);
        assert_eq!(shares, [10, 60, 15, 15]);
        max_min(u64::MAX, &[], &[], &mut shares);
        assert_eq!(shares, []);
    }

    proptest! {
        #[test]
        fn shares_are_max_min_fair(
            total in 0u64..3000,
            asked in prop::collection::vec((0u64..100, 0u64..600), 0..12),
        ) {
            let floors: Vec<u64> = asked.iter().map(|asked| asked.0).collect();
            let bids: Vec<u64> = asked.iter().map(|asked| asked.1).collect();
            let mut shares = Vec::new();
            max_min(total, &floors, &bids, &mut shares);
            let sum: u64 = shares.iter().sum();
            let bid: u64 = bids.iter().sum();
            prop_assert!(sum <= total);
            let floor = |at: usize| floors[at].min(bids[at]);
            let floor_sum: u64 = (0..bids.len()).map(floor).sum();
            if floor_sum <= total {
                prop_assert_eq!(sum, total.min(bid), "all that is bid for is used");
            }
            for at in 0..bids.len() {
                prop_assert!(shares[at] <= bids[at]);
                if floor_sum <= total {
                    prop_assert!(shares[at] >= floor(at));
                    let most = (0..bids.len())
                        .filter(|&other| shares[other] > floor(other))
                        .map(|other| shares[other])
                        .max();
                    if shares[at] < bids[at] {
                        prop_assert!(most.is_none_or(|most| most <= shares[at] + 1));
                    }
                }
            }
        }

        #[test]
        fn scaled_shares_fit(shares in prop::collection::vec(any::<u64>(), 0..9), total: u64) {
            let before: u128 = shares.iter().map(|&share| u128::from(share)).sum();
            let mut scaled = shares.clone();
            scale_to_fit(&mut scaled, total);
            let sum: u128 = scaled.iter().map(|&share| u128::from(share)).sum();
            prop_assert!(sum <= u128::from(total));
            if before > u128::from(total) {
                prop_assert!(sum + shares.len() as u128 > u128::from(total), "rounding only");
            } else {
                prop_assert_eq!(scaled, shares);
            }
        }
    }
}
