//! Reports a simulated run: times, fairness, adaptation, and use over time.

use crate::cluster::NodeId;
use crate::cluster::targets::share;
use serde::Serialize;

/// A consumer is at its fair share if it has nine tenths of it.
const AT_SHARE: f64 = 0.9;

/// One program of one machine.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct RunTime {
    /// Where it ran.
    pub node: NodeId,
    /// The machine.
    pub machine: String,
    /// Which of the machine's programs it was, from 1 on.
    pub iteration: usize,
    /// How long it took.
    pub seconds: f64,
}

/// A consumer at the end of a second.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Sample {
    /// Pool pages that the consumer holds, including those that no program will read.
    pub used_pages: u64,
    /// Pool pages that the consumer may hold; `None`: no limit.
    pub target_pages: Option<u64>,
}

/// The course of one machine, a sample for each second.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Course {
    /// Where it ran.
    pub node: NodeId,
    /// The machine.
    pub machine: String,
    /// From second 1 on.
    pub samples: Vec<Sample>,
}

/// A simulated run.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Outcome {
    /// All programs that ended, by node, machine and order.
    pub runs: Vec<RunTime>,
    /// Jain's index of how far consumers' needs were met, averaged over the seconds in which two or
    /// more consumers were in need. 1: all needs were met to the same degree.
    pub fairness: f64,
    /// Longest unbroken time of a consumer below its fair share, as the mean of all consumers.
    pub adaptation_s: f64,
    /// Seconds that consumers in need were below their fair share, mean of all programs.
    pub below_share_s: f64,
    /// Pages read from disks.
    pub disk_reads: u64,
    /// Puts that found no room.
    pub puts_failed: u64,
    /// Pages that passed from one owner to another.
    pub pages_moved: u64,
    /// Pages that were written to a disk to make room.
    pub pages_spilled: u64,
    /// Pages that a failed node had when it failed.
    pub pages_lost: u64,
    /// Pages without an owner known to the manager at the end: pages that were in flight, and pages
    /// of other nodes that a failed node had.
    pub pages_leaked: u64,
    /// Seconds simulated.
    pub seconds: u64,
    /// Use over time.
    pub courses: Vec<Course>,
}

impl Outcome {
    /// Mean time of the programs, of one node or of all.
    pub fn mean_s(&self, node: Option<NodeId>) -> f64 {
        mean(self.runs.iter().filter(|run| node.is_none_or(|node| run.node == node)))
    }

    /// The longest time of a program.
    pub fn longest_s(&self) -> f64 {
        self.runs.iter().map(|run| run.seconds).fold(0.0, f64::max)
    }
}

fn mean<'a>(runs: impl Iterator<Item = &'a RunTime>) -> f64 {
    let (sum, count) = runs.fold((0.0, 0.0), |(sum, count), run| (sum + run.seconds, count + 1.0));
    if count > 0.0 { sum / count } else { 0.0 }
}

/// Pool pages that a consumer needs and has at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Standing {
    /// The node's index.
    pub(super) node: usize,
    /// Pages that do not fit into its RAM.
    pub(super) need_pages: u64,
    /// Needed pages that are in the pool.
    pub(super) has_pages: u64,
}

/// Follows fairness and adaptation through a run.
#[derive(Debug, Default)]
pub(super) struct Fairness {
    index_sum: f64,
    index_seconds: u64,
    /// For each machine: seconds below its share in the current stretch, and in the longest one.
    below_for_s: Vec<(u64, u64)>,
    below_s: u64,
}

impl Fairness {
    /// Records one second. `home_pages`: pages of each node's own memory.
    pub(super) fn observe(&mut self, standings: &[Standing], home_pages: &[u64]) {
        self.below_for_s.resize(standings.len(), (0, 0));
        let met = |standing: &Standing| standing.has_pages as f64 / standing.need_pages as f64;
        let met: Vec<f64> =
            standings.iter().filter(|standing| standing.need_pages > 0).map(met).collect();
        if met.len() > 1 {
            self.index_sum += jain(&met);
            self.index_seconds += 1;
        }
        let shares = fair_shares(standings, home_pages);
        for (standing, (share, below)) in
            standings.iter().zip(shares.into_iter().zip(&mut self.below_for_s))
        {
            if (standing.has_pages as f64) < AT_SHARE * share as f64 {
                self.below_s += 1;
                below.0 += 1;
                below.1 = below.1.max(below.0);
            } else {
                below.0 = 0;
            }
        }
    }

    /// Writes the results into `outcome`.
    pub(super) fn end(&self, outcome: &mut Outcome) {
        let divide = |sum: f64, count: u64| if count > 0 { sum / count as f64 } else { 0.0 };
        let longest: u64 = self.below_for_s.iter().map(|(_, longest)| longest).sum();
        outcome.fairness = divide(self.index_sum, self.index_seconds);
        outcome.adaptation_s = divide(longest as f64, self.below_for_s.len() as u64);
        outcome.below_share_s = divide(self.below_s as f64, outcome.runs.len() as u64);
    }
}

/// The fairness index of Jain, Chiu and Hawe ("A quantitative measure of fairness and
/// discrimination", 1984): 1 if all values are equal (also 0), 1/n if one of n has everything.
pub fn jain(met: &[f64]) -> f64 {
    let sum: f64 = met.iter().sum();
    let squares: f64 = met.iter().map(|met| met * met).sum();
    if squares > 0.0 { sum * sum / (met.len() as f64 * squares) } else { 1.0 }
}

/// Each consumer's max-min fair share of the cluster's memory by true need. Shares are divided
/// first among nodes, which keep their own memory, then within each. No policy knows the needs.
fn fair_shares(standings: &[Standing], home_pages: &[u64]) -> Vec<u64> {
    let needs_of = |node: usize| standings.iter().filter(move |standing| standing.node == node);
    let bids: Vec<u64> = (0..home_pages.len())
        .map(|node| needs_of(node).map(|standing| standing.need_pages).sum())
        .collect();
    let mut of_nodes = Vec::new();
    share::max_min(home_pages.iter().sum(), home_pages, &bids, &mut of_nodes);
    let mut shares = vec![0; standings.len()];
    for (node, &of_node) in of_nodes.iter().enumerate() {
        let here: Vec<usize> =
            (0..standings.len()).filter(|&at| standings[at].node == node).collect();
        let bids: Vec<u64> = here.iter().map(|&at| standings[at].need_pages).collect();
        let mut of_consumers = Vec::new();
        share::max_min(of_node, &vec![0; bids.len()], &bids, &mut of_consumers);
        for (at, share) in here.into_iter().zip(of_consumers) {
            shares[at] = share;
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jains_index() {
        assert_eq!(jain(&[0.5, 0.5, 0.5]), 1.0);
        assert_eq!(jain(&[1.0, 0.0, 0.0, 0.0]), 0.25);
        assert_eq!(jain(&[0.0, 0.0]), 1.0);
    }

    #[test]
    fn a_fair_share_is_one_of_the_whole_cluster() {
        let standing = |node, need_pages| Standing { node, need_pages, has_pages: 0 };
        let standings = [standing(0, 50), standing(1, 500), standing(1, 100), standing(1, 500)];
        // Node 0 needs half of its memory. The rest of it, and node 2's memory, is for node 1.
        assert_eq!(fair_shares(&standings, &[100, 100, 300]), [50, 175, 100, 175]);
    }

    #[test]
    fn seconds_below_the_share_in_all_and_at_a_stretch() {
        let mut fairness = Fairness::default();
        for has in [0, 10, 95, 40, 100] {
            let standing = Standing { node: 0, need_pages: 100, has_pages: has };
            fairness.observe(&[standing], &[1000]);
        }
        let run = RunTime { node: NodeId(1), machine: String::new(), iteration: 1, seconds: 5.0 };
        let mut outcome = Outcome { runs: vec![run], ..Outcome::default() };
        fairness.end(&mut outcome);
        assert_eq!((outcome.adaptation_s, outcome.below_share_s), (2.0, 3.0));
    }
}
