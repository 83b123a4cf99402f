//! The donors of the nodes that are up, for all nodes to know, and whose each donor's name is.
//!
//! Each node asks once a second, and the list is seldom another. So each change of it has a number, and a node
//! that says which it knows hears what came after that.

use hecaton_memory::random_u64;
use hecaton_node::donor_list::{DonorList, ListVersion};
use hecaton_node::report::DonorAddress;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Most changes that are remembered. Who has missed more hears the whole list.
const MAX_CHANGES: usize = 8192;

/// The donors of a cluster.
#[derive(Debug)]
pub(crate) struct Roster {
    /// Of the last change.
    version: ListVersion,
    /// The names that the last changes were of.
    changes: VecDeque<String>,
    offered: BTreeMap<String, DonorAddress>,
    /// The nodes that each donor's name is of, silent ones too.
    homes: BTreeMap<String, BTreeSet<String>>,
}

impl Roster {
    pub(crate) fn new() -> Roster {
        // Drawn at random, as another manager counts its own changes; zero is what a node says that knows none.
        let version = ListVersion { list: random_u64().max(1), number: 0 };
        let (changes, offered, homes) = (VecDeque::new(), BTreeMap::new(), BTreeMap::new());
        Roster { version, changes, offered, homes }
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

    /// Offers these donors of a node, and no others of it that were: `before` names all that may have been.
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

    /// What a node is to hear that knows the list of `known`.
    pub(crate) fn since(&self, known: ListVersion) -> DonorList {
        let version = self.version;
        let missed =
            version.number.checked_sub(known.number).filter(|_| known.list == version.list);
        let missed =
            missed.filter(|missed| *missed <= self.changes.len().min(self.offered.len()) as u64);
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_node::donor_list::KnownDonors;
    use proptest::prelude::*;

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
        let whole = roster.since(ListVersion::default());
        assert_eq!((whole.donors.len(), whole.since), (3, None));
        let nothing = roster.since(whole.version);
        assert_eq!((&nothing.donors, &nothing.gone), (&vec![], &vec![]));
        let before = ["a-1", "a-2", "a-3"].into_iter();
        let moved = donor("a-2", "a", 9);
        roster.offer("a", before, [moved.clone(), third].into_iter());
        let news = roster.since(whole.version);
        assert_eq!((news.donors, news.gone), (vec![moved], vec!["a-1".to_owned()]));
        // Of another manager's list the number says nothing.
        let others = ListVersion { list: whole.version.list ^ 1, ..whole.version };
        assert_eq!(roster.since(others).since, None);
    }

    #[test]
    fn a_name_that_another_node_has_taken_is_not_withdrawn_by_the_first_ones_silence() {
        let mut roster = Roster::new();
        for node in ["a", "b"] {
            roster.belong(node, [].into_iter(), ["x"].into_iter());
        }
        roster.offer("b", [].into_iter(), [donor("x", "b", 2)].into_iter());
        roster.offer("a", ["x"].into_iter(), [].into_iter());
        assert_eq!(roster.since(ListVersion::default()).donors, [donor("x", "b", 2)]);
        assert!(roster.homes("x").eq(["a", "b"]));
        roster.belong("b", ["x"].into_iter(), [].into_iter());
        assert!(roster.homes("x").eq(["a"]));
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
                let answer = roster.since(known.version());
                if what > 0 {
                    known.hear(answer);
                    let offered: Vec<_> = roster.offered.values().cloned().collect();
                    prop_assert_eq!(known.donors().cloned().collect::<Vec<_>>(), offered);
                }
            }
        }
    }
}
