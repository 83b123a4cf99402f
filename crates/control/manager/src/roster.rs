//! Lists the donors of nodes that are up, and each donor name's nodes.
//!
//! Each node asks once a second, and the list rarely changes. So each change of it has a number,
//! and a node that tells the number it knows hears the later changes.

use hecaton_memory::random_u64;
use hecaton_node::cluster::donor_list::{DonorList, ListVersion};
use hecaton_node::cluster::report::DonorAddress;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::time::Duration;

/// Most changes that are remembered. A node that has missed more hears the whole list.
const MAX_CHANGES: usize = 8192;

/// Lists up to this length are told at once.
const SHORT: usize = 64;

/// Most entries of longer lists that are told in a second, to all nodes together, 100 MB: where
/// thousands come up at once, each is to hear of all, which is the square of them.
const MAX_LONG: usize = 1 << 20;

/// Donors that a node without a list hears of while it waits for the whole list.
const FIRST: usize = 16;

/// Length of the second in which [`MAX_LONG`] are told.
const SECOND: Duration = Duration::from_secs(1);

/// The donors of a cluster.
#[derive(Debug)]
pub(crate) struct Roster {
    /// Version of the last change.
    version: ListVersion,
    /// The names that the last changes were of.
    changes: VecDeque<String>,
    offered: BTreeMap<String, DonorAddress>,
    /// The nodes that each donor's name is of, silent ones too.
    homes: BTreeMap<String, BTreeSet<String>>,
    /// When the present second began, and the entries of longer lists that were told in it.
    second: Duration,
    told: usize,
}

impl Roster {
    pub(crate) fn new() -> Roster {
        // Drawn at random, as another manager counts its own changes; zero is what a node says that
        // knows none.
        let version = ListVersion { list: random_u64().max(1), number: 0 };
        let (changes, offered, homes) = (VecDeque::new(), BTreeMap::new(), BTreeMap::new());
        Roster { version, changes, offered, homes, second: Duration::ZERO, told: 0 }
    }

    /// Notes whose these donors are, which were another set before.
    pub(crate) fn belong<'a>(
        &mut self,
        node: &str,
        before: impl Iterator<Item = &'a str>,
        now: impl Iterator<Item = &'a str>,
    ) {
        for donor in before {
            if let Some(nodes) = self.homes.get_mut(donor)
                && nodes.remove(node)
                && nodes.is_empty()
            {
                self.homes.remove(donor);
            }
        }
        for donor in now {
            self.homes.entry(donor.to_owned()).or_default().insert(node.to_owned());
        }
    }

    /// The nodes that a donor's name is of: one, unless another one was silent when it was taken.
    pub(crate) fn homes(&self, donor: &str) -> impl DoubleEndedIterator<Item = &str> {
        self.homes.get(donor).into_iter().flatten().map(String::as_str)
    }

    /// Offers these donors of a node, and no others of it that were: `before` names all that may
    /// have been.
    pub(crate) fn offer<'a>(
        &mut self,
        node: &str,
        before: impl Iterator<Item = &'a str>,
        now: impl Iterator<Item = DonorAddress>,
    ) {
        let now: BTreeMap<String, DonorAddress> =
            now.map(|donor| (donor.name.clone(), donor)).collect();
        for donor in before.filter(|donor| !now.contains_key(*donor)) {
            if self.offered.get(donor).is_some_and(|offered| offered.node == node) {
                self.offered.remove(donor);
                self.changed(donor.to_owned());
            }
        }
        for (name, donor) in now {
            if self.offered.get(&name) != Some(&donor) {
                self.offered.insert(name.clone(), donor);
                self.changed(name);
            }
        }
    }

    fn changed(&mut self, donor: String) {
        self.version.number += 1;
        self.changes.push_back(donor);
        if self.changes.len() > MAX_CHANGES {
            self.changes.pop_front();
        }
    }

    /// List for `node`, which knows the version `known`: all of it, the changes, or nothing for
    /// now.
    pub(crate) fn since(&mut self, now: Duration, node: &str, known: ListVersion) -> DonorList {
        let version = self.version;
        let missed =
            version.number.checked_sub(known.number).filter(|_| known.list == version.list);
        let missed =
            missed.filter(|missed| *missed <= self.changes.len().min(self.offered.len()) as u64);
        let length = missed.map_or(self.offered.len(), |missed| missed as usize);
        if !self.may_tell(now, length, known.list == 0) {
            return self.for_now(node, known);
        }
        let Some(missed) = missed else {
            let donors = self.offered.values().cloned().collect();
            return DonorList { donors, version, ..DonorList::default() };
        };
        let names: BTreeSet<&String> = self.changes.iter().rev().take(missed as usize).collect();
        let (there, gone): (Vec<&String>, Vec<&String>) =
            names.into_iter().partition(|name| self.offered.contains_key(*name));
        DonorList {
            donors: there.into_iter().map(|name| self.offered[name].clone()).collect(),
            gone: gone.into_iter().cloned().collect(),
            version,
            since: Some(known.number),
        }
    }

    /// Whether a list of so many entries is told now. Half of a second's is for those that know
    /// none.
    fn may_tell(&mut self, now: Duration, length: usize, knows_none: bool) -> bool {
        if length <= SHORT {
            return true;
        }
        if now.saturating_sub(self.second) >= SECOND {
            (self.second, self.told) = (now, 0);
        }
        let most = if knows_none { MAX_LONG } else { MAX_LONG / 2 };
        // One is told however long it is.
        let may = self.told == 0 || self.told + length <= most;
        self.told += if may { length } else { 0 };
        may
    }

    /// For a node that asks again in a second: what it knows is as it was. If that is nothing, it
    /// hears of some donors, of others than most nodes.
    fn for_now(&self, node: &str, known: ListVersion) -> DonorList {
        let after = self.offered.range::<str, _>((Bound::Included(node), Bound::Unbounded));
        let before = self.offered.range::<str, _>((Bound::Unbounded, Bound::Excluded(node)));
        let some = if known.list == 0 { FIRST } else { 0 };
        let donors = after.chain(before).map(|(_, donor)| donor.clone()).take(some).collect();
        DonorList { donors, version: known, since: Some(known.number), ..DonorList::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_node::cluster::donor_list::KnownDonors;
    use proptest::prelude::*;

    const NOW: Duration = Duration::from_secs(100);

    fn donor(name: &str, node: &str, port: u16) -> DonorAddress {
        let address = ([127, 0, 0, 1], port).into();
        DonorAddress { name: name.into(), node: node.into(), location: None, address }
    }

    #[test]
    fn who_knows_the_list_hears_nothing_of_it() {
        let mut roster = Roster::new();
        let (first, third) = (donor("a-1", "a", 1), donor("a-3", "a", 3));
        let donors = [first, donor("a-2", "a", 2), third.clone()];
        roster.offer("a", [].into_iter(), donors.into_iter());
        let whole = roster.since(NOW, "n", ListVersion::default());
        assert_eq!((whole.donors.len(), whole.since), (3, None));
        let nothing = roster.since(NOW, "n", whole.version);
        assert_eq!((&nothing.donors, &nothing.gone), (&vec![], &vec![]));
        let before = ["a-1", "a-2", "a-3"].into_iter();
        let moved = donor("a-2", "a", 9);
        roster.offer("a", before, [moved.clone(), third].into_iter());
        let news = roster.since(NOW, "n", whole.version);
        assert_eq!((news.donors, news.gone), (vec![moved], vec!["a-1".to_owned()]));
        // The number of another manager's list says nothing.
        let others = ListVersion { list: whole.version.list ^ 1, ..whole.version };
        assert_eq!(roster.since(NOW, "n", others).since, None);
    }

    #[test]
    fn a_name_that_another_node_has_taken_is_not_withdrawn_by_the_first_ones_silence() {
        let mut roster = Roster::new();
        for node in ["a", "b"] {
            roster.belong(node, [].into_iter(), ["x"].into_iter());
        }
        roster.offer("b", [].into_iter(), [donor("x", "b", 2)].into_iter());
        roster.offer("a", ["x"].into_iter(), [].into_iter());
        assert_eq!(roster.since(NOW, "n", ListVersion::default()).donors, [donor("x", "b", 2)]);
        assert!(roster.homes("x").eq(["a", "b"]));
        roster.belong("b", ["x"].into_iter(), [].into_iter());
        assert!(roster.homes("x").eq(["a"]));
    }

    /// Each hears of all in the end, and no second's answers are longer than they may be.
    #[test]
    fn thousands_that_come_up_at_once_hear_of_each_other_one_after_the_other() {
        const NODES: usize = 1100;
        let names: Vec<String> = (0..NODES).map(|at| format!("n{at:04}")).collect();
        let mut roster = Roster::new();
        for name in &names {
            roster.offer(name, [].into_iter(), [donor(name, name, 1)].into_iter());
        }
        let mut cluster = vec![KnownDonors::default(); NODES];
        let mut seconds = 0;
        while cluster.iter().any(|known| known.donors().count() < NODES) {
            let mut told = 0;
            for (name, known) in names.iter().zip(&mut cluster) {
                let answer = roster.since(SECOND * seconds, name, known.version());
                told += answer.donors.len();
                known.hear(answer);
                let count = known.donors().count();
                assert!(count == NODES || count == FIRST, "{count}: some to begin with, then all");
            }
            assert!(told <= MAX_LONG + NODES * FIRST, "{told}");
            seconds += 1;
        }
        assert_eq!(seconds as usize, (NODES * NODES).div_ceil(MAX_LONG));
    }

    #[test]
    fn who_knows_the_list_waits_with_what_it_knows() {
        let mut roster = Roster::new();
        let all: Vec<DonorAddress> =
            (0..=SHORT).map(|at| donor(&format!("d{at:03}"), "a", 1)).collect();
        roster.offer("a", [].into_iter(), [donor("x", "a", 1)].into_iter());
        let mut known = KnownDonors::default();
        known.hear(roster.since(NOW, "n", known.version()));
        roster.offer("a", [].into_iter(), all.iter().cloned());
        roster.told = MAX_LONG;
        roster.second = NOW;
        known.hear(roster.since(NOW, "n", known.version()));
        assert_eq!(known.donors().count(), 1);
        known.hear(roster.since(NOW + SECOND, "n", known.version()));
        assert_eq!(known.donors().count(), all.len() + 1);
    }

    proptest! {
        /// Whatever answers are lost, a node that hears one knows what is offered.
        #[test]
        fn whoever_hears_knows_all(
            steps in prop::collection::vec((0usize..3, prop::collection::vec(1u16..4, 0..4), 0u8..3), 1..80),
        ) {
            let mut rosters = [Roster::new(), Roster::new()];
            let mut known = KnownDonors::default();
            let all = |node: usize| (0..4).map(move |at| format!("{node}-{at}"));
            for (node, ports, what) in steps {
                let roster = &mut rosters[usize::from(what == 2)];
                let name = node.to_string();
                let names: Vec<String> = all(node).collect();
                let now = ports.iter().enumerate().map(|(at, port)| donor(&names[at], &name, *port));
                roster.offer(&name, names.iter().map(String::as_str), now);
                let answer = roster.since(NOW, "n", known.version());
                if what > 0 {
                    known.hear(answer);
                    let offered: Vec<_> = roster.offered.values().cloned().collect();
                    prop_assert_eq!(known.donors().cloned().collect::<Vec<_>>(), offered);
                }
            }
        }
    }
}
