//! A donor that parks on a disk which is full after a while. A program of its own, because the
//! limit of what it may write is the process's.

mod common;

use common::*;
use hecaton_donor::{Donor, DonorConfig, ParkConfig, listen};
use hecaton_memory::{PAGE_SIZE, Size};
use hecaton_testkit::wait_until;
use hecaton_transport::client::Outcome;
use rustix::process::{Resource, getrlimit, setrlimit};
use std::time::Duration;

const ORDER: u8 = 6;
const EXTENT_BYTES: u64 = (PAGE_SIZE as u64) << ORDER;

fn set_file_limit(bytes: Option<u64>) {
    let limit = rustix::process::Rlimit { current: bytes, ..getrlimit(Resource::Fsize) };
    setrlimit(Resource::Fsize, limit).unwrap();
}

#[test]
fn what_the_disk_does_not_take_stays_in_memory_and_is_tried_again() {
    let before = getrlimit(Resource::Fsize).current;
    let park =
        ParkConfig { patience: Duration::ZERO, ..ParkConfig::new(hecaton_testkit::fast_dir()) };
    let config = DonorConfig { park: Some(park), ..config(16 << ORDER) };
    let donor = Donor::open(&config, None).unwrap();
    let serving = donor.serve(listen(config.listen).unwrap()).unwrap();
    let mut borrower = Borrower::connect(serving.address(), 1, 1);
    let contents =
        |number: u64| -> Vec<Page> { (0..1 << ORDER).map(|at| page(number * 100 + at)).collect() };
    let pages: Vec<u32> = (0..1 << ORDER).collect();
    let held: Vec<_> = (0..4)
        .map(|segment| {
            let extent = borrower.allocate(segment, ORDER);
            assert_eq!(borrower.write(extent, &pages, &contents(segment)), Outcome::Done);
            extent
        })
        .collect();

    // Two extents, and a part of the third.
    set_file_limit(Some(5 * EXTENT_BYTES / 2));
    donor.set_limit(Some(Size(0)));
    wait_until("the disk is full", || {
        donor.snapshot().park.unwrap().trouble.is_some_and(|why| why.contains("large"))
    });
    let snapshot = donor.snapshot();
    let park = snapshot.park.clone().unwrap();
    assert!(park.parked_pages <= 2 << ORDER, "{park:?}");
    assert!(snapshot.in_use_bytes() >= 2 * EXTENT_BYTES);
    let mut all_there = |number: u64, extent| {
        assert_eq!(borrower.pages(extent, &pages), contents(number));
        let data = contents(number + 50);
        assert_eq!(borrower.write(extent, &pages, &data), Outcome::Done);
        assert_eq!(borrower.pages(extent, &pages), data);
    };
    for (number, extent) in (0..).zip(&held) {
        all_there(number, *extent);
    }

    set_file_limit(before);
    wait_until("there is room again", || {
        let snapshot = donor.snapshot();
        let park = snapshot.park.unwrap();
        park.trouble.is_none() && park.parked_pages == 4 << ORDER && snapshot.committed_bytes == 0
    });
    for (number, extent) in (50..).zip(&held) {
        assert_eq!(borrower.pages(*extent, &pages), contents(number));
    }
}
