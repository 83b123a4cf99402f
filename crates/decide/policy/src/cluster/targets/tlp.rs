//! The first level of TLP, the paper's two-level policy (algorithm 2).
//!
//! A consumer with failed puts gets P % of the node's pages more. A consumer that leaves more than
//! a threshold of its target unused loses P % of it. When the targets overrun what the node owns,
//! the node asks for the difference and scales the targets down (equation 2).
//!
//! The paper divides `ttmem / sumtgt` before it multiplies. In integers that is zero, so it is
//! meant as a real number; here the product comes first, and is rounded down.

use super::{Decision, GREEDY_REQUEST_PAGES, Situation, present_target, share};
use serde::Serialize;

/// Settings of TLP.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Settings {
    /// P, in percent, from 1 to 100. The paper tries 1 to 10.
    pub percent: u64,
    /// Pages that a consumer may leave unused before its target falls. The paper gives no number.
    pub threshold_pages: u64,
    /// R of the second level ([`crate::cluster::grants::Tlp`]): pages that a node keeps free when
    /// others ask. The paper gives no number.
    pub reserve_pages: u64,
}

impl Default for Settings {
    /// P = 2 %, the best in most of the paper's scenarios; 4 MiB; 64 MiB.
    fn default() -> Self {
        Self { percent: 2, threshold_pages: 1024, reserve_pages: 16384 }
    }
}

pub(super) fn decide(settings: &Settings, situation: &Situation<'_>, decision: &mut Decision) {
    let percent = settings.percent.min(100);
    let total = situation.total_pages;
    let mut targets: Vec<u64> = Vec::with_capacity(situation.consumers.len());
    for consumer in situation.consumers {
        let current = present_target(situation, consumer);
        let unused = current.saturating_sub(consumer.used_pages);
        targets.push(if consumer.puts_failed() > 0 {
            current.saturating_add(of_hundred(total, percent))
        } else if unused > settings.threshold_pages {
            of_hundred(current, 100 - percent)
        } else {
            current
        });
    }
    let sum = targets.iter().fold(0u64, |sum, &target| sum.saturating_add(target));
    decision.request_pages = match total {
        // P % of nothing is nothing. In the paper every node has memory of its own; one that has
        // none asks as greedy-remote does.
        0 if situation.consumers.iter().any(|one| one.puts_failed() > 0) => GREEDY_REQUEST_PAGES,
        total => sum.saturating_sub(total),
    };
    decision.wanted_pages = sum;
    share::scale_to_fit(&mut targets, total);
    decision.targets.extend(targets.into_iter().map(Some));
}

fn of_hundred(pages: u64, percent: u64) -> u64 {
    (u128::from(pages) * u128::from(percent) / 100) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::ConsumerId;
    use crate::cluster::account::ConsumerStatistics;
    use crate::cluster::targets::{FirstLevel, Policy};

    const SETTINGS: Settings = Settings { percent: 10, threshold_pages: 50, reserve_pages: 0 };

    fn consumer(used: u64, target: Option<u64>, failed: u64) -> ConsumerStatistics {
        ConsumerStatistics {
            id: ConsumerId(0),
            used_pages: used,
            target_pages: target,
            puts_total: failed,
            puts_succeeded: 0,
            gets: 0,
        }
    }

    fn decide(total_pages: u64, consumers: &[ConsumerStatistics]) -> (Vec<u64>, u64) {
        let mut decision = Decision::default();
        let situation = Situation { total_pages, owed_pages: 0, consumers };
        FirstLevel::new(Policy::Tlp(SETTINGS)).decide(&situation, &mut decision);
        (decision.targets.iter().flatten().copied().collect(), decision.request_pages)
    }

    #[test]
    fn all_begin_with_an_equal_portion() {
        let fresh = consumer(490, None, 0);
        assert_eq!(decide(1000, &[fresh, fresh]), (vec![500, 500], 0));
    }

    #[test]
    fn failed_puts_raise_and_unused_pages_lower_a_target() {
        let failing = consumer(300, Some(300), 1);
        let idle = consumer(0, Some(500), 0);
        assert_eq!(decide(1000, &[failing, idle]), (vec![400, 450], 0));
        let within_threshold = consumer(450, Some(500), 0);
        assert_eq!(decide(1000, &[failing, within_threshold]), (vec![400, 500], 0));
    }

    #[test]
    fn what_overruns_is_asked_for_and_scaled_down() {
        let failing = consumer(500, Some(500), 7);
        // 600 and 600 of 1000.
        assert_eq!(decide(1000, &[failing, failing]), (vec![500, 500], 200));
        let small = consumer(100, Some(100), 7);
        // 1000 and 200 of 1000.
        let large = consumer(900, Some(900), 7);
        assert_eq!(decide(1000, &[large, small]), (vec![833, 166], 200));
    }

    #[test]
    fn a_node_without_memory_of_its_own_asks_for_some() {
        assert_eq!(decide(0, &[consumer(5, None, 7)]), (vec![0], GREEDY_REQUEST_PAGES));
        assert_eq!(decide(0, &[consumer(5, None, 0)]), (vec![0], 0));
    }
}
