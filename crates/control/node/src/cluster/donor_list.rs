//! The list of the cluster's donors, as a manager tells it: whole, or what of it has changed.

use crate::cluster::report::DonorAddress;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Which list, as of which of its changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListVersion {
    /// Each manager has its own; zero: none.
    pub list: u64,
    /// The number of its last change.
    pub number: u64,
}

/// A manager's word on the donors of the nodes that it hears from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DonorList {
    /// All of them; with `since`, those that came or changed.
    pub donors: Vec<DonorAddress>,
    /// With `since`, those that are there no more, by name.
    #[serde(default, rename = "donors_gone", skip_serializing_if = "Vec::is_empty")]
    pub gone: Vec<String>,
    /// The version that a node has after this list. A manager that counts no changes sends none.
    #[serde(default, rename = "donors_version")]
    pub version: ListVersion,
    /// The number of the change, of the same list, that the rest came after.
    #[serde(default, rename = "donors_since", skip_serializing_if = "Option::is_none")]
    pub since: Option<u64>,
}

/// A node's copy of the donor list.
#[derive(Clone, Debug, Default)]
pub struct KnownDonors {
    version: ListVersion,
    by_name: BTreeMap<String, DonorAddress>,
}

impl KnownDonors {
    /// The version to report to the manager.
    pub fn version(&self) -> ListVersion {
        self.version
    }

    /// The donors, by name.
    pub fn donors(&self) -> impl Iterator<Item = &DonorAddress> {
        self.by_name.values()
    }

    /// Takes a manager's list. Ignores changes since another version than the known one: the next
    /// heartbeat tells the manager which version the node has.
    pub fn hear(&mut self, list: DonorList) {
        let DonorList { donors, gone, version, since } = list;
        match since {
            None => self.by_name.clear(),
            Some(number) if self.version != (ListVersion { number, ..version }) => return,
            Some(_) => {}
        }
        for name in gone {
            self.by_name.remove(&name);
        }
        self.by_name.extend(donors.into_iter().map(|donor| (donor.name.clone(), donor)));
        self.version = version;
    }
}

impl From<Vec<DonorAddress>> for DonorList {
    fn from(donors: Vec<DonorAddress>) -> DonorList {
        DonorList { donors, ..DonorList::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn donor(name: &str, port: u16) -> DonorAddress {
        let address = ([127, 0, 0, 1], port).into();
        DonorAddress { name: name.into(), node: "n".into(), location: None, address }
    }

    #[test]
    fn news_count_for_who_knows_what_they_came_after() {
        let mut known = KnownDonors::default();
        let version = |number| ListVersion { list: 7, number };
        let list = |since, number, donors, gone: &[&str]| DonorList {
            donors,
            gone: gone.iter().map(|name| (*name).to_owned()).collect(),
            version: version(number),
            since,
        };
        known.hear(list(None, 3, vec![donor("a", 1), donor("b", 2)], &[]));
        known.hear(list(Some(3), 5, vec![donor("b", 9)], &["a"]));
        let now = |known: &KnownDonors| known.donors().cloned().collect::<Vec<_>>();
        assert_eq!((now(&known), known.version()), (vec![donor("b", 9)], version(5)));
        // The same answer again, as it was late.
        known.hear(list(Some(3), 5, vec![donor("c", 1)], &["b"]));
        assert_eq!((now(&known), known.version()), (vec![donor("b", 9)], version(5)));
        // A manager of an earlier version tells all, each time.
        known.hear(vec![donor("d", 4)].into());
        assert_eq!((now(&known), known.version()), (vec![donor("d", 4)], ListVersion::default()));
    }

    #[test]
    fn a_node_of_an_earlier_version_reads_the_whole_list() {
        let text = serde_json::to_value(DonorList::from(vec![donor("a", 1)])).unwrap();
        assert_eq!(text["donors"][0]["name"], "a");
        assert!(text.get("donors_since").is_none());
        let old: DonorList = serde_json::from_str(r#"{"donors": []}"#).unwrap();
        assert_eq!(old, DonorList::default());
    }
}
