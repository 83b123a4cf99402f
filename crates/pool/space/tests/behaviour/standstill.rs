//! A borrower that stands still (stopped, frozen, paused with its virtual machine) finds that every
//! time limit is over when it goes on. It blames no donor for that.

use crate::common::*;
use hecaton_memory::page_sum;
use hecaton_space::{Completion, Redundancy, Space, SpaceConfig};
use hecaton_testkit::wait_until_seen;
use std::time::Duration;

#[test]
fn what_was_asked_before_is_answered_after() {
    let donors = ["a", "b"].map(|name| Lent::start(name, 16));
    let mut config = SpaceConfig { redundancy: Redundancy::Mirror(2), ..config(4 * SEGMENT_PAGES) };
    let longest = Duration::from_secs(3);
    let_be_silent_for(longest, &mut config);
    let space = Space::create(config, cluster(&[&donors[0], &donors[1]])).unwrap();
    let mut lane = space.lane().unwrap();
    write_until_stored(&mut lane, &[0], 1);
    tend_until(&space, "whole", is_whole);
    let contents = content(1, 2);
    lane.write(8, &[1], &[page_sum(&contents)], &[&contents]).unwrap();
    lane.read(7, &[0]).unwrap();
    // The lane's owner does not run: nothing is waited for here, time has to pass. Donors answer
    // meanwhile, and nobody looks.
    std::thread::sleep(longest + Duration::from_millis(500));
    let (mut written, mut read) = (false, false);
    wait_until_seen("both are answered", || {
        lane.progress(Some(Duration::from_millis(100)), &mut |completion| match completion {
            Completion::Written { token: 8, .. } => written = true,
            Completion::Read { token: 7, data, .. } => read = *data == content(0, 1),
            other => panic!("{other:?}"),
        });
        (written && read).then_some(()).ok_or_else(|| format!("written {written}, read {read}"))
    });
    let status = space.status();
    assert_eq!(status.segments_degraded, 0, "{status:?}");
    assert!(status.donors.iter().all(|donor| donor.reachable && !donor.overdue), "{status:?}");
    space.release().unwrap();
    donors.iter().for_each(Lent::assert_all_comes_back);
}
