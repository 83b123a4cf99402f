//! Descriptors of a pager that was killed, as the node gives them back.
//!
//! Their numbers differ from those in the tables and the journal; labels identify them. The
//! takeover itself follows in `recover`.
//!
//! Where the node does not hold what an address space needs, the pager was killed before it had
//! handed it over. Then nobody had been told to go on: the other side sees the connection end, and
//! asks again. Or the node had stopped holding for this pager; then a program may have run on it,
//! and the consumer is ended.

use crate::error::PagerError;
use crate::guest::Ram;
use crate::process::guard;
use crate::process::worker::Held;
use crate::programs::address_space::{AddressSpace, Renumbered};
use crate::state::{MAX_SPACES, State};
use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};

/// Descriptors by their labels.
pub(crate) type Labelled = Vec<(String, OwnedFd)>;

/// Puts the descriptors in their places. Also gives the labels that nothing needs any more.
///
/// May be cut short by a kill and done again by the next pager: it goes by labels and serial
/// numbers alone, which it does not change.
pub(crate) fn adopt(held: Labelled) -> Result<(Held, Vec<String>), PagerError> {
    let mut held: HashMap<String, OwnedFd> = held.into_iter().collect();
    let mut take = |label: &str| {
        let fd = held.remove(label).map(IntoRawFd::into_raw_fd);
        fd.ok_or_else(|| std::io::Error::other(format!("the node does not hold the {label}")))
    };
    let (state_fd, listener, control) =
        (take(guard::STATE)?, take(guard::LISTENER)?, take(guard::CONTROL)?);
    // SAFETY: just received, and closed nowhere.
    let (state, _) = State::open(unsafe { BorrowedFd::borrow_raw(state_fd) })?;
    let firecracker = held.remove(guard::FIRECRACKER).map(IntoRawFd::into_raw_fd);
    let public = held.remove(guard::PUBLIC).map(IntoRawFd::into_raw_fd);
    let lost = renumber(&state, &mut held);
    let strays = held.into_keys().collect();
    Ok((Held { state: state_fd, listener, public, control, firecracker, lost }, strays))
}

/// Enters the numbers under which the descriptors came, and takes those out of `held`. True if a
/// program ran on memory whose userfaultfd is not among them.
fn renumber(state: &State, held: &mut HashMap<String, OwnedFd>) -> bool {
    let number =
        |held: &HashMap<String, OwnedFd>, label: String| held.get(&label).map(AsRawFd::as_raw_fd);
    // Before the address spaces, which look at their files.
    let ram = Ram::renumber(state, |serial| number(held, guard::ram_label(serial)));
    let mut used: Vec<String> = ram.found.into_iter().map(guard::ram_label).collect();
    let mut lost = ram.lost;
    for index in 0..MAX_SPACES {
        let renumbered = AddressSpace::renumber(state, index, |serial| {
            let uffd = number(held, guard::uffd_label(serial));
            (uffd, number(held, guard::helper_label(serial)))
        });
        lost |= renumbered == Renumbered::Lost;
        if let Some(space) = AddressSpace::load(state, index) {
            used.extend((space.uffd.0 >= 0).then(|| guard::uffd_label(space.serial)));
            used.extend(space.connection().map(|_| guard::helper_label(space.serial)));
        }
    }
    for label in used {
        // Open for good, under the number that was entered.
        let _ = held.remove(&label).map(IntoRawFd::into_raw_fd);
    }
    lost
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::helper::Helper;
    use crate::programs::stage::Stage;
    use hecaton_uffd::Uffd;

    fn state() -> State {
        let fd = State::create().expect("a state file");
        // SAFETY: just created, never closed.
        State::open(unsafe { BorrowedFd::borrow_raw(fd) }).expect("mapped").0
    }

    fn fd() -> OwnedFd {
        tempfile::tempfile().expect("a file").into()
    }

    fn save(state: &State, index: usize, serial: u64, stage: Stage) {
        let helper = Helper { socket: 71, area: 1 << 20, ..Helper::NONE };
        let is_child = matches!(stage, Stage::Forking { .. });
        let mut space = AddressSpace::new(Uffd(if is_child { -1 } else { 70 }), helper);
        space.serial = serial;
        space.advance(state, index, stage);
    }

    fn held<const N: usize>(labels: [&str; N]) -> HashMap<String, OwnedFd> {
        labels.map(|label| (label.to_owned(), fd())).into()
    }

    #[test]
    fn numbers_are_entered_and_strays_told() {
        let state = state();
        save(&state, 0, 5, Stage::Live);
        save(&state, 3, 9, Stage::Welcoming);
        let mut held = held(["uffd-5", "helper-5", "uffd-9", "helper-9", "uffd-4", "helper-4"]);
        let expected: Vec<_> = ["uffd-5", "helper-5", "uffd-9", "helper-9"]
            .map(|label| held[label].as_raw_fd())
            .into();
        assert!(!renumber(&state, &mut held));
        let mut strays: Vec<_> = held.into_keys().collect();
        strays.sort();
        assert_eq!(strays, ["helper-4", "uffd-4"]);
        let spaces = [0, 3].map(|i| AddressSpace::load(&state, i).expect("there"));
        let numbers =
            spaces.iter().flat_map(|space| [space.uffd.0, space.helper.expect("kept").socket]);
        assert_eq!(numbers.collect::<Vec<_>>(), expected);
        assert_eq!(spaces.map(|space| space.stage), [Stage::Live, Stage::Welcoming]);
    }

    #[test]
    fn a_program_that_ran_and_is_not_held_is_lost() {
        for stage in [Stage::Live, Stage::Welcoming] {
            let state = state();
            save(&state, 0, 5, stage);
            assert!(renumber(&state, &mut held(["uffd-6", "helper-5"])));
            assert_eq!(AddressSpace::load(&state, 0).expect("there").stage, Stage::Preparing);
        }
    }

    #[test]
    fn who_was_not_let_go_on_asks_again() {
        for stage in [Stage::Preparing, Stage::Forking { parent: Some(1) }] {
            let state = state();
            save(&state, 0, 5, stage);
            let mut held = held(["uffd-5"]);
            assert!(!renumber(&state, &mut held));
            let space = AddressSpace::load(&state, 0).expect("there");
            assert_eq!((space.stage, space.uffd.0), (Stage::Preparing, -1));
            assert!(space.helper.is_none() && held.contains_key("uffd-5"));
        }
    }

    #[test]
    fn a_child_says_once_more_who_it_is() {
        let state = state();
        let stage = Stage::Forking { parent: Some(1) };
        save(&state, 0, 5, stage);
        // Its userfaultfd was handed over, but nothing was noted of it.
        let mut held = held(["uffd-5", "helper-5"]);
        let connection = held["helper-5"].as_raw_fd();
        assert!(!renumber(&state, &mut held));
        let space = AddressSpace::load(&state, 0).expect("there");
        assert_eq!(space.stage, stage);
        assert_eq!(space.helper.expect("kept").socket, connection);
        assert_eq!(held.into_keys().collect::<Vec<_>>(), ["uffd-5"]);
    }
}
