//! The donors that this node's pagers may borrow from: its own, those the manager told of, and
//! those that the network announces.
//!
//! The node's own donors come from the supervisor and not by way of the manager, so that a cluster
//! of one node works from its first second, and goes on when the manager does not answer.

use crate::cluster::donor_list::{DonorList, KnownDonors, ListVersion};
use crate::cluster::report::DonorAddress;
use hecaton_pager::Site;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

/// The donors known at this moment.
#[derive(Debug)]
pub struct DonorDirectory {
    site: Site,
    /// The directory of the node's certificate, where donors take no one without.
    tls_dir: Option<PathBuf>,
    own: Vec<DonorAddress>,
    of_others: Mutex<OfOthers>,
}

/// Those of other nodes, by who told of them.
#[derive(Debug, Default)]
struct OfOthers {
    managed: KnownDonors,
    announced: Vec<DonorAddress>,
    /// Those that nobody tells of any more, the latest last.
    former: Vec<DonorAddress>,
}

/// Most donors that are remembered when nobody tells of them any more.
const MAX_FORMER: usize = 4096;

impl OfOthers {
    fn told_of(&self) -> impl Iterator<Item = &DonorAddress> {
        self.managed.donors().chain(&self.announced)
    }

    /// Remembers those that are told of no more, now that `before` was replaced.
    fn remember(&mut self, before: Vec<DonorAddress>) {
        let told_of = self.managed.donors().chain(&self.announced);
        let now: BTreeSet<&str> = told_of.map(|donor| donor.name.as_str()).collect();
        let is_told_of = |donor: &DonorAddress| now.contains(donor.name.as_str());
        let gone: Vec<_> = before.into_iter().filter(|donor| !is_told_of(donor)).collect();
        let is_gone = |donor: &DonorAddress| gone.iter().any(|other| other.name == donor.name);
        self.former.retain(|donor| !is_told_of(donor) && !is_gone(donor));
        self.former.extend(gone);
        let surplus = self.former.len().saturating_sub(MAX_FORMER);
        self.former.drain(..surplus);
    }
}

impl DonorDirectory {
    /// Knows where the node is, and its own donors.
    pub fn new(site: Site, own: Vec<DonorAddress>) -> DonorDirectory {
        DonorDirectory { site, tls_dir: None, own, of_others: Mutex::default() }
    }

    /// The same, of donors that take nobody without a certificate.
    pub fn with_tls(self, tls_dir: Option<PathBuf>) -> DonorDirectory {
        DonorDirectory { tls_dir, ..self }
    }

    /// Where the node's certificate is, if donors take nobody without one.
    pub fn tls_dir(&self) -> Option<&Path> {
        self.tls_dir.as_deref()
    }

    /// Takes what the manager knows.
    pub fn update(&self, list: DonorList) {
        let mut others = self.of_others();
        // Most of the time there is nothing new.
        if list.since.is_some() && list.donors.is_empty() && list.gone.is_empty() {
            return;
        }
        let before = others.managed.donors().cloned().collect();
        others.managed.hear(list);
        others.remember(before);
    }

    /// Version of the manager's list that this node knows.
    pub fn version(&self) -> ListVersion {
        self.of_others().managed.version()
    }

    /// Takes what the network announces.
    pub fn update_announced(&self, announced: Vec<DonorAddress>) {
        let mut others = self.of_others();
        let before = std::mem::replace(&mut others.announced, announced);
        others.remember(before);
    }

    /// Remembers those that a node before this one knew, for who takes over what is stored there.
    pub fn remember(&self, before: Vec<DonorAddress>) {
        self.of_others().remember(before);
    }

    /// Where the node is: others are near or far from here.
    pub fn site(&self) -> &Site {
        &self.site
    }

    /// Where the node's own donors are, the first of them.
    pub fn own_address(&self) -> Option<SocketAddr> {
        self.own.first().map(|donor| donor.address)
    }

    /// All donors: the node's own first, then those of the manager, then those that are only
    /// announced. The first entry of a name counts.
    pub fn all(&self) -> Vec<DonorAddress> {
        let others = self.of_others();
        self.with_own(others.told_of())
    }

    /// Those, and after them all that were told of once: for who takes over what another has
    /// stored. A node that the manager hears no more may have some of it all the same.
    pub fn ever(&self) -> Vec<DonorAddress> {
        let others = self.of_others();
        self.with_own(others.told_of().chain(&others.former))
    }

    fn with_own<'a>(&self, others: impl Iterator<Item = &'a DonorAddress>) -> Vec<DonorAddress> {
        each_once(self.own.iter().cloned().chain(others.cloned()))
    }

    fn of_others(&self) -> MutexGuard<'_, OfOthers> {
        self.of_others.lock().expect("no thread panics with the directory")
    }
}

/// Those that are told of now, with what is said of them now, and after them those that were told
/// of before.
pub fn joined(now: Vec<DonorAddress>, before: Vec<DonorAddress>) -> Vec<DonorAddress> {
    let most = now.len() + MAX_FORMER;
    let mut all = each_once(now.into_iter().chain(before));
    all.truncate(most);
    all
}

/// Keeps the first donor of each name.
fn each_once(donors: impl Iterator<Item = DonorAddress>) -> Vec<DonorAddress> {
    let mut names = BTreeSet::new();
    donors.filter(|donor| names.insert(donor.name.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn donor(name: &str, node: &str, port: u16) -> DonorAddress {
        let address = ([127, 0, 0, 1], port).into();
        DonorAddress { name: name.into(), node: node.into(), location: None, address }
    }

    #[test]
    fn the_nodes_own_word_on_its_donors_counts() {
        let directory = DonorDirectory::new(Site::unplaced("a"), vec![donor("a-1", "a", 1)]);
        assert_eq!(directory.all(), [donor("a-1", "a", 1)]);
        directory.update(vec![donor("b-1", "b", 2), donor("a-1", "a", 9)].into());
        assert_eq!(directory.all(), [donor("a-1", "a", 1), donor("b-1", "b", 2)]);
        directory.update(vec![].into());
        assert_eq!(directory.all(), [donor("a-1", "a", 1)]);
    }

    #[test]
    fn the_managers_word_counts_more_than_an_announcement() {
        let directory = DonorDirectory::new(Site::unplaced("a"), vec![donor("a-1", "a", 1)]);
        directory.update_announced(vec![
            donor("a-1", "x", 9),
            donor("b-1", "x", 9),
            donor("c", "c", 3),
        ]);
        directory.update(vec![donor("b-1", "b", 2)].into());
        let known = [donor("a-1", "a", 1), donor("b-1", "b", 2), donor("c", "c", 3)];
        assert_eq!(directory.all(), known);
        directory.update(vec![].into());
        assert_eq!(
            directory.all(),
            [donor("a-1", "a", 1), donor("b-1", "x", 9), donor("c", "c", 3)]
        );
    }

    #[test]
    fn a_donor_that_nobody_tells_of_any_more_is_remembered_for_who_takes_over() {
        let directory = DonorDirectory::new(Site::unplaced("a"), vec![donor("a-1", "a", 1)]);
        directory.update(vec![donor("b-1", "b", 2), donor("c-1", "c", 3)].into());
        assert_eq!(directory.ever(), directory.all());
        directory.update(vec![donor("c-1", "c", 3)].into());
        assert_eq!(directory.all(), [donor("a-1", "a", 1), donor("c-1", "c", 3)]);
        let ever = [donor("a-1", "a", 1), donor("c-1", "c", 3), donor("b-1", "b", 2)];
        assert_eq!(directory.ever(), ever);
        // It is back, elsewhere.
        directory.update(vec![donor("b-1", "b", 4)].into());
        let ever = [donor("a-1", "a", 1), donor("b-1", "b", 4), donor("c-1", "c", 3)];
        assert_eq!(directory.ever(), ever);
        directory.update_announced((0..5000).map(|n| donor(&n.to_string(), "x", 5)).collect());
        directory.update_announced(vec![]);
        assert_eq!(directory.ever().len(), 2 + MAX_FORMER);
    }

    #[test]
    fn what_the_node_before_knew_is_remembered() {
        let directory = DonorDirectory::new(Site::unplaced("a"), vec![donor("a-1", "a", 1)]);
        directory.update(vec![donor("b-1", "b", 2)].into());
        let before =
            joined(vec![donor("b-1", "b", 9)], vec![donor("b-1", "b", 8), donor("c-1", "c", 3)]);
        assert_eq!(before, [donor("b-1", "b", 9), donor("c-1", "c", 3)]);
        directory.remember(before);
        let all = [donor("a-1", "a", 1), donor("b-1", "b", 2)];
        assert_eq!(directory.all(), all);
        assert_eq!(directory.ever(), [&all[..], &[donor("c-1", "c", 3)]].concat());
    }
}
