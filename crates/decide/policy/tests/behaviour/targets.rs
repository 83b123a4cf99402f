//! The promises of the first level, on statistics of any kind and on consumers that behave.

use hecaton_policy::cluster::ConsumerId;
use hecaton_policy::cluster::account::ConsumerStatistics;
use hecaton_policy::cluster::targets::{
    Decision, FirstLevel, Policy, Situation, anticipating, share, tlp,
};
use proptest::prelude::*;

/// One consumer in one period: part of its target that it uses (in percent, beyond it too), puts,
/// failures, gets.
type Period = (u64, u64, u64, u64);

fn any_periods() -> impl Strategy<Value = Vec<Vec<Period>>> {
    let period = (0u64..150, 0u64..5000, 0u64..5000, 0u64..9000);
    (1usize..6).prop_flat_map(move |consumers| {
        prop::collection::vec(prop::collection::vec(period.clone(), consumers), 1..40)
    })
}

fn statistics(id: usize, target: Option<u64>, period: Period) -> ConsumerStatistics {
    let (percent, succeeded, failed, gets) = period;
    ConsumerStatistics {
        id: ConsumerId(id as u64),
        used_pages: target.unwrap_or(0) * percent / 100,
        target_pages: target,
        puts_total: succeeded + failed,
        puts_succeeded: succeeded,
        gets,
    }
}

/// Runs the policy on the periods; after each calls `check` with the targets before, the consumers
/// and the decision.
fn drive(
    policy: Policy,
    totals: impl Fn(usize) -> u64,
    periods: &[Vec<Period>],
    mut check: impl FnMut(usize, &[ConsumerStatistics], &Decision) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let mut level = FirstLevel::new(policy);
    let mut decision = Decision::default();
    let mut targets = vec![None; periods[0].len()];
    for (at, period) in periods.iter().enumerate() {
        let consumers: Vec<_> = (0..period.len())
            .map(|consumer| statistics(consumer, targets[consumer], period[consumer]))
            .collect();
        let situation = Situation { total_pages: totals(at), owed_pages: 0, consumers: &consumers };
        level.decide(&situation, &mut decision);
        prop_assert_eq!(decision.targets.len(), consumers.len());
        check(at, &consumers, &decision)?;
        targets.clone_from(&decision.targets);
    }
    Ok(())
}

fn sum(targets: &[Option<u64>]) -> u64 {
    targets.iter().flatten().sum()
}

const OURS: anticipating::Settings = anticipating::Settings {
    lookahead_periods: 3,
    idle_periods: 10,
    minimum_pages: 500,
    step_permille: 250,
    band_permille: 20,
    reserve_pages: 0,
    take_back: true,
};

proptest! {
    #[test]
    fn targets_never_overrun_what_the_node_owns(
        periods in any_periods(),
        totals in prop::collection::vec(0u64..200_000, 40),
        percent in 1u64..=100,
    ) {
        let tlp = tlp::Settings { percent, threshold_pages: 100, reserve_pages: 0 };
        for policy in [Policy::Tlp(tlp), Policy::Anticipating(OURS)] {
            drive(policy, |at| totals[at], &periods, |at, _, decision| {
                prop_assert!(sum(&decision.targets) <= totals[at]);
                Ok(())
            })?;
        }
    }

    #[test]
    fn tlp_asks_for_what_it_overran(periods in any_periods(), percent in 1u64..=100) {
        let total = 100_000;
        let tlp = tlp::Settings { percent, threshold_pages: 100, reserve_pages: 0 };
        drive(Policy::Tlp(tlp), |_| total, &periods, |_, consumers, decision| {
            let failing = consumers.iter().filter(|consumer| consumer.puts_failed() > 0).count();
            prop_assert!(decision.request_pages <= failing as u64 * (total * percent / 100));
            if decision.request_pages > 0 {
                // All is divided: rounding takes less than a page of each.
                prop_assert!(sum(&decision.targets) + consumers.len() as u64 > total);
            }
            Ok(())
        })?;
    }

    #[test]
    fn ours_moves_by_a_step_at_most_and_never_below_the_minimum(
        periods in any_periods(),
        total in 0u64..200_000,
    ) {
        drive(Policy::Anticipating(OURS), |_| total, &periods, |_, consumers, decision| {
            let portion = total / consumers.len() as u64;
            let step = (total * OURS.step_permille / 1000).max(OURS.minimum_pages);
            for (consumer, target) in consumers.iter().zip(&decision.targets) {
                let before = consumer.target_pages.unwrap_or(portion);
                let now = target.unwrap();
                prop_assert!(now.abs_diff(before) <= step, "{before} to {now}, a step is {step}");
                prop_assert!(now >= OURS.minimum_pages.min(portion), "{now} of {total}");
            }
            Ok(())
        })?;
    }

    #[test]
    fn ours_takes_back_only_idle_pages_and_no_more_than_others_lack(
        periods in any_periods(),
        totals in prop::collection::vec(1u64..200_000, 40),
    ) {
        let mut touched: Vec<Vec<u64>> = Vec::new();
        drive(Policy::Anticipating(OURS), |at| totals[at], &periods, |at, consumers, decision| {
            let now = consumers.iter().map(|c| c.puts_succeeded + c.gets).collect();
            touched.push(now);
            let with_targets = || consumers.iter().zip(&decision.targets);
            let used: u64 = consumers.iter().map(|consumer| consumer.used_pages).sum();
            let lacking: u64 = with_targets()
                .map(|(consumer, target)| target.unwrap().saturating_sub(consumer.used_pages))
                .sum();
            let free = totals[at].saturating_sub(used);
            let taken: u64 = decision.take_back.iter().sum();
            prop_assert!(taken <= lacking.saturating_sub(free), "more than others lack");
            for (index, consumer) in consumers.iter().enumerate() {
                let taken = decision.take_back[index];
                if taken == 0 {
                    continue;
                }
                let target = decision.targets[index].unwrap();
                prop_assert!(taken <= consumer.used_pages.saturating_sub(target));
                // Pages that it touched in this very period are never taken.
                let last = touched.last().unwrap()[index];
                prop_assert!(taken <= consumer.used_pages.saturating_sub(last));
                prop_assert!(at + 1 >= OURS.idle_periods as usize, "too young to judge");
            }
            Ok(())
        })?;
    }

    /// Consumers with steady needs, who use what they may: everyone comes to its fair share.
    #[test]
    fn ours_starves_nobody(
        needs in prop::collection::vec(0u64..150_000, 1..7),
        first in prop::collection::vec(0u64..=100, 7),
        total in 10_000u64..200_000,
    ) {
        // Where they begin: some have all, some nothing.
        let mut used: Vec<u64> =
            needs.iter().zip(&first).map(|(need, part)| need * part / 100).collect();
        share::scale_to_fit(&mut used, total);
        let mut level = FirstLevel::new(Policy::Anticipating(OURS));
        let mut decision = Decision::default();
        let mut targets: Vec<Option<u64>> = used.iter().map(|used| Some(*used)).collect();
        for _ in 0..30 {
            let consumers: Vec<_> = (0..needs.len())
                .map(|at| {
                    let may = targets[at].unwrap().min(needs[at]);
                    let (stored, failed) = (may.saturating_sub(used[at]), needs[at] - may);
                    used[at] = may;
                    ConsumerStatistics {
                        id: ConsumerId(at as u64),
                        used_pages: used[at],
                        target_pages: targets[at],
                        puts_total: stored + failed,
                        puts_succeeded: stored,
                        gets: used[at],
                    }
                })
                .collect();
            let situation = Situation { total_pages: total, owed_pages: 0, consumers: &consumers };
            level.decide(&situation, &mut decision);
            targets.clone_from(&decision.targets);
        }
        let mut fair = Vec::new();
        share::max_min(total, &vec![0; needs.len()], &needs, &mut fair);
        // Headroom above the needs and the minimum of the others may be kept from a share; so may a
        // band.
        let kept = OURS.minimum_pages * needs.len() as u64 + total / 10;
        for (at, fair) in fair.iter().enumerate() {
            let has = targets[at].unwrap().min(needs[at]);
            prop_assert!(has + kept >= *fair, "{has} of {fair}; {:?} of {needs:?}", targets);
        }
    }

    #[test]
    fn nobody_in_want_is_left_waiting_by_who_needs_nothing(
        total in 20_000u64..200_000,
        part in 2u64..12,
    ) {
        // One has filled the node and does nothing any more; the other begins.
        let mut level = FirstLevel::new(Policy::Anticipating(OURS));
        let mut decision = Decision::default();
        let mut used = [total - 1000, 0u64];
        let mut targets = [Some(total - 1000), Some(1000)];
        let need = total / part;
        for _ in 0..60 {
            let free = total - used[0] - used[1];
            let may = targets[1].unwrap().min(need).min(used[1] + free);
            let consumer = |at: usize, used_pages, stored, failed| ConsumerStatistics {
                id: ConsumerId(at as u64),
                used_pages,
                target_pages: targets[at],
                puts_total: stored + failed,
                puts_succeeded: stored,
                gets: if at == 1 { used_pages } else { 0 },
            };
            let consumers = [
                consumer(0, used[0], 0, 0),
                consumer(1, may, may - used[1].min(may), need - may),
            ];
            used[1] = may;
            let situation = Situation { total_pages: total, owed_pages: 0, consumers: &consumers };
            level.decide(&situation, &mut decision);
            targets = [decision.targets[0], decision.targets[1]];
            used[0] -= decision.take_back[0];
            prop_assert_eq!(decision.take_back[1], 0, "it uses all that it has");
        }
        prop_assert_eq!(used[1], need);
    }
}

#[test]
fn a_growing_consumer_is_met_before_it_fails() {
    let mut level = FirstLevel::new(Policy::Anticipating(OURS));
    let mut decision = Decision::default();
    let mut target = Some(20_000u64);
    for period in 1..=15u64 {
        let used_pages = 4000 * period;
        let consumer = ConsumerStatistics {
            id: ConsumerId(0),
            used_pages,
            target_pages: target,
            puts_total: 4000,
            puts_succeeded: 4000,
            gets: 0,
        };
        let idle = ConsumerStatistics {
            id: ConsumerId(1),
            used_pages: 0,
            puts_total: 0,
            puts_succeeded: 0,
            target_pages: decision.targets.get(1).copied().flatten(),
            ..consumer
        };
        let consumers = [consumer, idle];
        let situation = Situation { total_pages: 100_000, owed_pages: 0, consumers: &consumers };
        level.decide(&situation, &mut decision);
        target = decision.targets[0];
        assert!(target >= Some(used_pages + 4000), "{target:?} after {used_pages}");
    }
}

/// The first period in which pages are taken back from a consumer that has all of the node's, reads
/// a hundredth of them in each, and finds no room for `failing` puts, while another has nothing.
fn first_taken_back(failing: u64) -> Option<u64> {
    let total = 100_000;
    let mut level = FirstLevel::new(Policy::Anticipating(OURS));
    let mut decision = Decision::default();
    (1..200).find(|_| {
        let target = |at: usize| decision.targets.get(at).copied().flatten();
        let consumer = |at: usize, used_pages, gets, puts_total| ConsumerStatistics {
            id: ConsumerId(at as u64),
            used_pages,
            target_pages: target(at),
            puts_total,
            puts_succeeded: 0,
            gets,
        };
        let consumers = [consumer(0, total, total / 100, failing), consumer(1, 0, 0, 1000)];
        let situation = Situation { total_pages: total, owed_pages: 0, consumers: &consumers };
        level.decide(&situation, &mut decision);
        decision.take_back[0] > 0
    })
}

#[test]
fn who_is_in_want_is_not_soon_taken_for_idle() {
    assert_eq!(first_taken_back(0), Some(OURS.idle_periods));
    // It may be slow because it waits for its disk. But it does not keep all for ever.
    assert_eq!(first_taken_back(1), Some(6 * OURS.idle_periods));
}
