//! Which donors the network has, as far as was heard.
//!
//! Decisions only: what was heard, and when, comes in as arguments.

use super::announcement::Announcement;
use crate::cluster::report::DonorAddress;
use std::collections::BTreeMap;
use std::time::Duration;

/// Most nodes that are remembered.
pub const MAX_NODES: usize = 1024;

/// A node that was not heard for this long is not offered to borrowers any more.
pub const SILENT_AFTER: Duration = Duration::from_secs(5);

/// Why an announcement counts for nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Ignored {
    /// Another node of that name is there.
    #[error("two nodes of this network call themselves `{0}`; the one that was heard first counts")]
    NameTaken(String),
    /// A donor of that name is another node's.
    #[error("the donor name `{donor}` is taken by node `{node}`; that one counts")]
    DonorTaken {
        /// The donor.
        donor: String,
        /// The node that has a donor of this name.
        node: String,
    },
    /// There are [`MAX_NODES`].
    #[error("{MAX_NODES} nodes are heard, and no more are listened to")]
    TooManyNodes,
}

/// Nodes that were heard.
#[derive(Debug, Default)]
pub struct Heard {
    nodes: BTreeMap<String, (Duration, Announcement)>,
}

impl Heard {
    /// Takes a node's announcement. An older announcement that arrives late changes nothing.
    pub fn hear(&mut self, now: Duration, news: Announcement) -> Result<(), Ignored> {
        self.nodes.retain(|_, (heard, _)| now.saturating_sub(*heard) < SILENT_AFTER);
        if let Some((_, known)) = self.nodes.get(&news.node) {
            if known.boot != news.boot && !known.donors.is_empty() {
                return Err(Ignored::NameTaken(news.node));
            }
            if known.boot == news.boot && known.number >= news.number {
                return Ok(());
            }
        } else if self.nodes.len() >= MAX_NODES {
            return Err(Ignored::TooManyNodes);
        }
        let others = self.nodes.values().filter(|(_, known)| known.node != news.node);
        for (_, other) in others {
            let taken = |name: &str| other.donors.iter().any(|donor| donor.name == name);
            if let Some(donor) = news.donors.iter().find(|donor| taken(&donor.name)) {
                let (donor, node) = (donor.name.clone(), other.node.clone());
                return Err(Ignored::DonorTaken { donor, node });
            }
        }
        self.nodes.insert(news.node.clone(), (now, news));
        Ok(())
    }

    /// The donors of the nodes that were heard lately.
    pub fn donors(&self, now: Duration) -> Vec<DonorAddress> {
        let is_fresh = |heard: Duration| now.saturating_sub(heard) < SILENT_AFTER;
        let fresh = self.nodes.values().filter(|(heard, _)| is_fresh(*heard));
        fresh.flat_map(|(_, known)| known.addresses()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::announcement::Announced;
    use super::*;
    use proptest::prelude::*;

    const START: Duration = Duration::from_secs(100);

    fn news(node: &str, boot: u64, number: u64, donors: &[&str]) -> Announcement {
        let announced = |name: &&str| Announced {
            name: (*name).to_owned(),
            address: ([10, 0, 0, 1], 7071).into(),
        };
        Announcement {
            node: node.to_owned(),
            boot,
            number,
            location: None,
            donors: donors.iter().map(announced).collect(),
        }
    }

    fn names(heard: &Heard, now: Duration) -> Vec<String> {
        heard.donors(now).into_iter().map(|donor| donor.name).collect()
    }

    #[test]
    fn who_is_heard_is_offered_until_it_falls_silent_or_says_farewell() {
        let mut heard = Heard::default();
        heard.hear(START, news("a", 1, 0, &["a-1", "a-2"])).unwrap();
        heard.hear(START, news("b", 1, 0, &["b-1"])).unwrap();
        assert_eq!(names(&heard, START), ["a-1", "a-2", "b-1"]);
        heard.hear(START, news("b", 1, Announcement::LAST, &[])).unwrap();
        assert_eq!(names(&heard, START), ["a-1", "a-2"]);
        assert!(names(&heard, START + SILENT_AFTER).is_empty());
    }

    #[test]
    fn what_comes_late_or_twice_changes_nothing() {
        let mut heard = Heard::default();
        heard.hear(START, news("a", 1, 5, &["new"])).unwrap();
        heard.hear(START, news("a", 1, 4, &["old"])).unwrap();
        heard.hear(START + SILENT_AFTER / 2, news("a", 1, 5, &["new"])).unwrap();
        assert_eq!(names(&heard, START), ["new"]);
        assert!(names(&heard, START + SILENT_AFTER).is_empty(), "a repetition is no sign of life");
    }

    #[test]
    fn a_name_is_whose_it_was_until_that_one_is_gone() {
        let mut heard = Heard::default();
        heard.hear(START, news("a", 1, 9, &["x"])).unwrap();
        assert_eq!(heard.hear(START, news("a", 2, 0, &[])), Err(Ignored::NameTaken("a".into())));
        let taken = Ignored::DonorTaken { donor: "x".into(), node: "a".into() };
        assert_eq!(heard.hear(START, news("b", 1, 0, &["x"])), Err(taken));
        // One that said farewell may begin anew at once.
        heard.hear(START, news("a", 1, Announcement::LAST, &[])).unwrap();
        heard.hear(START, news("a", 2, 0, &["y"])).unwrap();
        assert_eq!(names(&heard, START), ["y"]);
        heard.hear(START + SILENT_AFTER, news("a", 3, 0, &["z"])).unwrap();
        assert_eq!(names(&heard, START + SILENT_AFTER), ["z"]);
    }

    #[test]
    fn the_number_of_nodes_is_bounded() {
        let mut heard = Heard::default();
        for number in 0..MAX_NODES {
            heard.hear(START, news(&format!("n{number}"), 1, 0, &[])).unwrap();
        }
        let one_more = heard.hear(START, news("more", 1, 0, &[]));
        assert_eq!(one_more, Err(Ignored::TooManyNodes));
        heard.hear(START + SILENT_AFTER, news("more", 1, 0, &[])).unwrap();
    }

    proptest! {
        /// Whatever is heard, in whatever order: no name is offered twice.
        #[test]
        fn the_donors_are_unambiguous(
            said in prop::collection::vec((0u64..3000, 0usize..4, 0u64..3, 0u64..9, 0usize..6), 1..80),
        ) {
            let (nodes, donors) = (["a", "b", "c", "d"], ["u", "v", "w", "x", "y", "z"]);
            let (mut heard, mut now) = (Heard::default(), START);
            for (passed_ms, node, boot, number, donor) in said {
                now += Duration::from_millis(passed_ms);
                let _ = heard.hear(now, news(nodes[node], boot, number, &[donors[donor]]));
                let mut offered = names(&heard, now);
                let count = offered.len();
                offered.sort();
                offered.dedup();
                prop_assert_eq!(count, offered.len());
            }
        }
    }
}
