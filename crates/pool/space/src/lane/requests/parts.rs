//! The parts of a write, one for each member of its group.

use crate::lane::flights::{Cause, Slot};
use crate::map::group::{Group, MAX_MEMBERS, Place};
use crate::map::lookup::Whereabouts;

/// One member's part of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Unsent,
    Sent(Slot),
    Stored,
    Failed(Cause),
    /// It was never sent, since the donor was not reached in time.
    GivenUp,
}

/// Why a write has failed that is not with all members of the group.
///
/// Interrupted when it is certain that nothing of it lands any more, or lands only where it is not
/// looked for; unreachable when a member may still get it.
pub(super) fn worst(
    asked: &Group,
    parts: &[Part; MAX_MEMBERS],
    now_at: Whereabouts,
) -> (Place, Cause) {
    let failed = asked.members().iter().zip(parts).filter_map(|(member, part)| match part {
        Part::Failed(cause) => Some((member.place, *cause)),
        Part::GivenUp => Some((member.place, Cause::Unreachable)),
        _ => None,
    });
    let is_member = |place: Place| match now_at {
        Whereabouts::Held(group) => group.contains(place),
        _ => true,
    };
    let rank = |cause: Cause| match cause {
        Cause::Fenced => 4,
        Cause::Refused(_) => 3,
        Cause::Unreachable => 2,
        Cause::Lost => 1,
        Cause::Interrupted => 0,
    };
    let is_lost = !matches!(now_at, Whereabouts::Held(_));
    let anywhere = asked.members()[0].place;
    let worst = failed
        .filter(|(place, cause)| match cause {
            Cause::Lost => is_lost,
            Cause::Unreachable => is_member(*place),
            _ => true,
        })
        .max_by_key(|(_, cause)| rank(*cause));
    match worst {
        Some((place, Cause::Interrupted)) | Some((place, Cause::Unreachable)) if is_lost => {
            (place, Cause::Lost)
        }
        Some(worst) => worst,
        None if is_lost => (anywhere, Cause::Lost),
        // All that were asked have it, and somebody has joined.
        None => (anywhere, Cause::Interrupted),
    }
}
