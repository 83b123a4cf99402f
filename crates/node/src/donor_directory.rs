//! The donors that this node's pagers may borrow from: its own, and those the manager told of.
//!
//! The node's own donors come from the supervisor and not by way of the manager, so that a cluster
//! of one node works from its first second, and goes on when the manager does not answer.

use crate::report::DonorAddress;
use hecaton_pager::Site;
use std::sync::Mutex;

/// The donors known at this moment.
#[derive(Debug)]
pub struct DonorDirectory {
    site: Site,
    own: Vec<DonorAddress>,
    all: Mutex<Vec<DonorAddress>>,
}

impl DonorDirectory {
    /// Knows where the node is, and its own donors.
    pub fn new(site: Site, own: Vec<DonorAddress>) -> DonorDirectory {
        DonorDirectory { site, all: Mutex::new(own.clone()), own }
    }

    /// Takes what the manager knows.
    pub fn update(&self, cluster: Vec<DonorAddress>) {
        let all = merge(&self.own, cluster);
        *self.all.lock().expect("no thread panics with the directory") = all;
    }

    /// Where the node is: others are near or far from here.
    pub fn site(&self) -> &Site {
        &self.site
    }

    /// All donors, the node's own first.
    pub fn all(&self) -> Vec<DonorAddress> {
        self.all.lock().expect("no thread panics with the directory").clone()
    }
}

/// The node's own donors, then those of the cluster that are not among them by name.
fn merge(own: &[DonorAddress], cluster: Vec<DonorAddress>) -> Vec<DonorAddress> {
    let others = cluster.into_iter().filter(|donor| own.iter().all(|mine| mine.name != donor.name));
    own.iter().cloned().chain(others).collect()
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
        directory.update(vec![donor("b-1", "b", 2), donor("a-1", "a", 9)]);
        assert_eq!(directory.all(), [donor("a-1", "a", 1), donor("b-1", "b", 2)]);
        directory.update(vec![]);
        assert_eq!(directory.all(), [donor("a-1", "a", 1)]);
    }
}
