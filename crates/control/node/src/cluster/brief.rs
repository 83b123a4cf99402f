//! A node's report in brief: where a cluster has more consumers than a manager can hear of one by
//! one, each node tells of some, and sums of the others.

use crate::children::processes::Role;
use crate::cluster::report::NodeReport;
use crate::pagers::ConsumerReport;
use crate::vms::VmState;
use hecaton_memory::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

/// The consumers of a node that its report does not tell of one by one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Untold {
    /// How many they are.
    pub consumers: u32,
    /// How many of them are in trouble.
    pub in_trouble: u32,
    /// Bytes of their memory on this host; none if one of them has not said.
    pub local_bytes: Option<u64>,
    /// Bytes of theirs that the pool holds; none if one of them has not said.
    pub pool_bytes: Option<u64>,
    /// Pages that they hold, by donor.
    pub held_pages: BTreeMap<String, u64>,
}

impl Untold {
    fn of(consumers: &[ConsumerReport], in_trouble: usize) -> Untold {
        let stats = || consumers.iter().map(|one| one.stats.as_ref());
        let mut held_pages = BTreeMap::new();
        for (donor, pages) in consumers.iter().flat_map(ConsumerReport::held_at_donors) {
            *held_pages.entry(donor.to_owned()).or_default() += pages;
        }
        Untold {
            consumers: consumers.len() as u32,
            in_trouble: in_trouble as u32,
            local_bytes: stats().map(|stats| Some(stats?.local_bytes)).sum(),
            pool_bytes: stats().map(|stats| Some(stats?.pool_bytes)).sum(),
            held_pages,
        }
    }
}

impl ConsumerReport {
    /// Whether somebody should look at it.
    pub fn is_in_trouble(&self) -> bool {
        let Some(stats) = &self.stats else { return false };
        let pool = &stats.pool;
        let bytes = pool.lost_bytes | pool.degraded_bytes | pool.to_move_bytes;
        bytes > 0
            || pool.scrub.lost_pages > 0
            || stats.checksum_errors > 0
            || stats.limit_is_advisory
    }

    /// The donors that it holds extents at, with pages.
    pub(crate) fn held_at_donors(&self) -> impl Iterator<Item = (&str, u64)> {
        let donors = self.stats.iter().flat_map(|stats| &stats.pool.donors);
        donors.map(|one| (one.name.as_str(), one.bytes / PAGE_SIZE as u64))
    }
}

impl NodeReport {
    /// How many consumers the node has, but for volumes.
    pub fn consumer_count(&self) -> usize {
        let untold = self.untold.as_ref().map_or(0, |untold| untold.consumers as usize);
        self.consumers.len() + untold
    }

    /// Shortens the report to `most` consumers, and to the `most` largest spaces of each donor.
    /// Consumers in trouble stay first, then those with most pages in the pool.
    pub fn in_brief(mut self, most: usize) -> NodeReport {
        let spaces =
            self.donors.iter_mut().filter_map(|donor| Some(&mut donor.stats.as_mut()?.spaces));
        for spaces in spaces.filter(|spaces| spaces.len() > most) {
            spaces.sort_by_key(|space| Reverse(space.pages));
            spaces.truncate(most);
        }
        if self.consumers.len() <= most {
            return self;
        }
        let is_stopped = |state| matches!(state, VmState::Stopped | VmState::Stuck);
        let stopped: HashSet<String> =
            self.vms.iter().filter(|vm| is_stopped(vm.state)).map(|vm| vm.name.clone()).collect();
        let in_trouble = |one: &ConsumerReport| one.is_in_trouble() || stopped.contains(&one.name);
        self.consumers.sort_by_cached_key(|one| {
            let pool_bytes = one.stats.as_ref().map_or(0, |stats| stats.pool_bytes);
            (Reverse(in_trouble(one)), Reverse(pool_bytes), one.name.clone())
        });
        let rest = self.consumers.split_off(most);
        self.consumers.sort_by(|a, b| a.name.cmp(&b.name));
        let unseen = rest.iter().filter(|one| in_trouble(one)).count();
        self.untold = Some(Untold::of(&rest, unseen));
        let names: HashSet<&str> = rest.iter().map(|one| one.name.as_str()).collect();
        self.vms.retain(|vm| !names.contains(vm.name.as_str()));
        self.processes.retain(|one| one.role != Role::Pager || !names.contains(one.name.as_str()));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::children::processes::{ProcessReport, ProcessUse};
    use crate::donors::DonorReport;
    use crate::vms::VmReport;
    use hecaton_donor::{Snapshot, SpaceSnapshot};
    use hecaton_memory::{Epoch, SpaceId};
    use hecaton_pager::{DonorUse, PoolUse, Stats};

    const PAGE: u64 = PAGE_SIZE as u64;

    /// Has so many pages at the donors `x` and `y`.
    fn consumer(name: &str, at_x: u64, at_y: u64) -> ConsumerReport {
        let held = |name: &str, pages| DonorUse {
            name: name.to_owned(),
            bytes: pages * PAGE,
            ..DonorUse::default()
        };
        let donors = vec![held("x", at_x), held("y", at_y)];
        let pool = PoolUse { donors, ..PoolUse::default() };
        let pool_bytes = (at_x + at_y) * PAGE;
        let stats = Stats { local_bytes: PAGE, pool_bytes, pool, ..Stats::default() };
        ConsumerReport { name: name.to_owned(), stats: Some(stats), ..ConsumerReport::default() }
    }

    fn report(consumers: Vec<ConsumerReport>) -> NodeReport {
        let process = |one: &ConsumerReport| ProcessReport {
            role: Role::Pager,
            name: one.name.clone(),
            takes: ProcessUse::default(),
        };
        let processes = consumers.iter().map(process).collect();
        NodeReport { consumers, processes, ..NodeReport::default() }
    }

    fn names(report: &NodeReport) -> Vec<&str> {
        report.consumers.iter().map(|one| one.name.as_str()).collect()
    }

    #[test]
    fn what_is_not_told_is_in_the_sums() {
        let all = vec![consumer("a", 1, 2), consumer("b", 30, 0), consumer("c", 4, 0)];
        let whole = report(all);
        let held = |report: &NodeReport| {
            let mut held = BTreeMap::<String, u64>::new();
            for (donor, pages) in report.held_at_donors() {
                *held.entry(donor.to_owned()).or_default() += pages;
            }
            held
        };
        let before = held(&whole);
        let brief = whole.clone().in_brief(1);
        assert_eq!(names(&brief), ["b"]);
        assert_eq!(brief.processes.len(), 1);
        assert_eq!((brief.consumer_count(), held(&brief)), (3, before));
        let untold = brief.untold.unwrap();
        assert_eq!((untold.local_bytes, untold.pool_bytes), (Some(2 * PAGE), Some(7 * PAGE)));
        assert_eq!(whole.in_brief(3).untold, None);
        let silent = ConsumerReport { name: "z".to_owned(), ..ConsumerReport::default() };
        let unknown = report(vec![silent, consumer("a", 1, 1)]).in_brief(1);
        assert_eq!(unknown.untold.unwrap().pool_bytes, None);
    }

    #[test]
    fn those_in_trouble_come_first() {
        let mut lost = consumer("lost", 1, 0);
        lost.stats.as_mut().unwrap().pool.lost_bytes = 1;
        let mut whole =
            report(vec![consumer("a", 9, 0), consumer("b", 8, 0), lost, consumer("vm", 2, 0)]);
        let stopped = VmReport {
            name: "vm".to_owned(),
            state: VmState::Stopped,
            run_state: None,
            reason: None,
            pid: None,
            memory_bytes: None,
            monitor: None,
        };
        whole.vms.push(stopped);
        let brief = whole.clone().in_brief(2);
        assert_eq!((names(&brief), brief.vms.len()), (vec!["lost", "vm"], 1));
        assert_eq!(brief.untold.unwrap().in_trouble, 0);
        let brief = whole.in_brief(1);
        assert_eq!((names(&brief), brief.vms.len()), (vec!["vm"], 1), "it has more");
        assert_eq!(brief.untold.unwrap().in_trouble, 1);
    }

    #[test]
    fn of_a_donors_spaces_the_largest_are_told() {
        let space = |id, pages| SpaceSnapshot {
            space: SpaceId(id),
            consumer: id.to_string(),
            fence: Epoch(1),
            extents: 1,
            pages,
            recalled: 0,
            silent_ms: 0,
            lease_ms: 1,
        };
        let spaces = vec![space(1, 5), space(2, 50), space(3, 6)];
        let stats = Some(Snapshot { spaces, ..Snapshot::default() });
        let donors = vec![DonorReport { stats, ..DonorReport::default() }];
        let brief = NodeReport { donors, ..NodeReport::default() }.in_brief(2);
        let told = brief.donors[0].stats.iter().flat_map(|stats| &stats.spaces);
        assert!(told.map(|space| space.space.0).eq([2, 3]));
    }
}
