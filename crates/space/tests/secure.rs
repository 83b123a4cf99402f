//! A space whose connections are protected: pages go to donors of the nodes that the directory names, by way of
//! TLS, and so do copies from donor to donor.

mod common;

use common::*;
use hecaton_pki::{Authority, Identity, Role, Wish};
use hecaton_space::{Redundancy, Space, SpaceConfig};
use hecaton_transport::tls::CredentialsDir;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const SEGMENTS: u64 = 4;

struct Pki {
    _scratch: tempfile::TempDir,
    authority: Authority,
}

impl Pki {
    fn new() -> Pki {
        let scratch = tempfile::tempdir().unwrap();
        let authority = Authority::init(&scratch.path().join("pki")).unwrap();
        Pki { _scratch: scratch, authority }
    }

    fn issue(&self, name: &str) -> PathBuf {
        let identity = Identity { name: name.to_owned(), role: Role::Node };
        let wish = Wish { identity, hosts: Vec::new(), days: 1, renew: false };
        self.authority.issue(&wish).unwrap().dir
    }

    /// A donor of the node of that name.
    fn lend(&self, name: &str) -> Lent {
        Lent::start_secure(name, 16, self.issue(name))
    }

    fn config(&self, redundancy: Redundancy) -> SpaceConfig {
        let credentials = Some(Arc::new(CredentialsDir::new(self.issue("borrower"))));
        SpaceConfig { redundancy, credentials, ..config(SEGMENTS * SEGMENT_PAGES) }
    }
}

/// The pages of each segment.
fn segments() -> Vec<Vec<u64>> {
    let pages = |segment| segment * SEGMENT_PAGES..(segment + 1) * SEGMENT_PAGES;
    (0..SEGMENTS).map(|segment| pages(segment).collect()).collect()
}

#[test]
fn pages_are_stored_and_copied_from_donor_to_donor() {
    let pki = Pki::new();
    let mut donors = ["a", "b", "c"].map(|name| pki.lend(name));
    let known = cluster(&donors.each_ref());
    let space = Space::create(pki.config(Redundancy::Mirror(2)), known).unwrap();
    let mut lane = space.lane().unwrap();
    for pages in segments() {
        assert_written(&mut lane, &pages, 1);
        assert_reads(&mut lane, &pages, 1);
    }
    // What it had is copied anew between the two that are left.
    donors[0].stop();
    segments().iter().for_each(|pages| write_until_stored(&mut lane, &pages[..10], 2));
    tend_until(&space, "whole again", is_whole);
    assert!(space.status().bytes_filled > 0);
    for pages in segments() {
        assert_reads(&mut lane, &pages[..10], 2);
        assert_reads(&mut lane, &pages[10..], 1);
    }
    let _ = space.release();
    donors[1].assert_all_comes_back();
    donors[2].assert_all_comes_back();
}

#[test]
fn neither_end_takes_who_is_not_whom_it_should_be() {
    let pki = Pki::new();
    let donor = pki.lend("a");
    let short = |config: SpaceConfig| SpaceConfig {
        patience: Duration::from_millis(300),
        give_up: Duration::from_millis(300),
        ..config
    };
    // A borrower without a certificate.
    let plain = short(config(SEGMENTS * SEGMENT_PAGES));
    let written = Space::create(plain, cluster(&[&donor]))
        .and_then(|space| space.lane())
        .map(|mut lane| write(&mut lane, &[1], 1));
    assert!(!matches!(written, Ok(Outcome::Written)), "without a certificate");
    // A donor of another node than the directory says.
    let known = Known::default();
    known.set("b", donor.address());
    let secure = short(pki.config(Redundancy::None));
    let written = Space::create(secure, Arc::new(known))
        .and_then(|space| space.lane())
        .map(|mut lane| write(&mut lane, &[1], 1));
    assert!(!matches!(written, Ok(Outcome::Written)), "node a was taken for node b");
    assert!(donor.is_all_free());
}
