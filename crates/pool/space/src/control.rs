//! The blocking connection to one donor for everything that is not a page: extents, lists, fences,
//! discards and renewals. Shared by the space's threads, one call at a time.
//!
//! Every control request may be repeated without harm: allocating names what it allocates for,
//! freeing twice finds nothing the second time. So a call goes on over a new connection when one
//! breaks, as long as its persistence lasts.

use crate::map::group::{DonorIndex, Place};
use crate::{Space, SpaceError};
use hecaton_memory::{ExtentId, random_u64};
use hecaton_transport::client::{Connection, ConnectionError, Options, Outcome, Patience};
use hecaton_transport::protocol::{MAX_HELD, OWNERS_SINCE, Refusal, Request};
use hecaton_transport::tls::{CredentialsDir, Destination, Tls};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};
use tracing::{debug, info};

/// How long a call is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Persistence {
    /// On the connection that is there, or one new one.
    Once,
    /// The same, for no longer than the space's failover time: others can be asked instead.
    Brief,
    /// On new connections, until the donor has been silent for the space's patience.
    Patient,
}

/// Between two attempts to reach a donor that does not answer.
const PAUSE: Duration = Duration::from_millis(50);

/// Between two looks whether a connection is free.
const GLANCE: Duration = Duration::from_millis(1);

/// A donor, with the space's control connections to it: one for what is done at once, and one for
/// copies that take long.
pub(crate) struct Donor {
    pub(crate) index: DonorIndex,
    pub(crate) name: String,
    place: Mutex<DonorPlace>,
    link: Mutex<Link>,
    bulk: Mutex<Link>,
}

/// Where a donor is.
#[derive(Clone, Debug)]
pub(crate) struct DonorPlace {
    pub(crate) address: SocketAddr,
    /// The node that it belongs to.
    pub(crate) node: String,
}

/// A control connection, and the lane id that its successors share.
pub(crate) struct Link {
    lane: u64,
    open: Option<Open>,
    silence: Option<Silence>,
}

/// Attempts that failed one after the other, with no answer between them. Callers wait for the
/// patience together and not one after the other: a donor that has been silent for that long when
/// it is a caller's turn is asked once more, and that is all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Silence {
    since: Instant,
    latest: Instant,
}

impl Silence {
    /// As it stands after an attempt that failed just now, of a call that began then. A failure so
    /// long ago that all of the patience had passed by then was another silence: nobody has looked
    /// meanwhile.
    fn goes_on(
        before: Option<Silence>,
        began: Instant,
        now: Instant,
        patience: Duration,
    ) -> Silence {
        let before = before.filter(|before| began <= before.latest + patience);
        Silence { since: before.map_or(began, |before| before.since), latest: now }
    }
}

struct Open {
    connection: Connection,
    boot: u64,
    begun: Duration,
}

/// A donor's answer, and the boot of the donor that gave it.
pub(crate) struct Answered {
    pub(crate) outcome: Outcome,
    pub(crate) boot: u64,
}

impl Donor {
    pub(crate) fn new(index: DonorIndex, name: &str, place: DonorPlace) -> Donor {
        let link = || Mutex::new(Link { lane: random_u64(), open: None, silence: None });
        let (name, place) = (name.to_owned(), Mutex::new(place));
        Donor { index, name, place, link: link(), bulk: link() }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.place().address
    }

    /// The node that it belongs to.
    pub(crate) fn node(&self) -> String {
        self.place().node.clone()
    }

    pub(crate) fn set_place(&self, place: DonorPlace) {
        *self.place() = place;
    }

    /// How it is reached by whoever has these credentials.
    pub(crate) fn destination(&self, credentials: Option<&Arc<CredentialsDir>>) -> Destination {
        let DonorPlace { address, node } = self.place().clone();
        let tls = |credentials| Tls { credentials: Arc::clone(credentials), node: Some(node) };
        Destination { address, tls: credentials.map(tls) }
    }

    fn place(&self) -> MutexGuard<'_, DonorPlace> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The control connection. Taken before the space's map, never after.
    pub(crate) fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The control connection, unless somebody waits for its answer for all of that time.
    pub(crate) fn link_within(&self, limit: Duration) -> Option<MutexGuard<'_, Link>> {
        // Glances count, and not the clock: who has the link may have stood still, too.
        let mut left = limit;
        loop {
            match self.link.try_lock() {
                Ok(link) => return Some(link),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if left.is_zero() => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(GLANCE),
            }
            left = left.saturating_sub(GLANCE);
        }
    }

    /// The connection for copies.
    pub(crate) fn bulk_link(&self) -> MutexGuard<'_, Link> {
        self.bulk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link {
    /// Asks the donor. With `expected`, only as long as the donor is in the life that gave the
    /// extent; otherwise the segment is lost.
    pub(crate) fn call(
        &mut self,
        space: &Space,
        donor: &Donor,
        expected: Option<(u64, Place)>,
        request: Request<'_>,
        persistence: Persistence,
    ) -> Result<Answered, SpaceError> {
        self.call_with(space, donor, expected, (request, &[]), persistence)
    }

    /// As [`Link::call`], with pages that follow the request.
    pub(crate) fn call_with(
        &mut self,
        space: &Space,
        donor: &Donor,
        expected: Option<(u64, Place)>,
        request: (Request<'_>, &[&[u8]]),
        persistence: Persistence,
    ) -> Result<Answered, SpaceError> {
        let began = Instant::now();
        let mut within = match persistence {
            Persistence::Brief => {
                let Options { connect, answer, .. } = space.config().connection;
                Within(Some(Patience::new(space.config().failover.min(connect).min(answer))))
            }
            Persistence::Once | Persistence::Patient => Within(None),
        };
        let mut fresh = 0;
        loop {
            if space.is_fenced() {
                return Err(space.fenced_error());
            }
            let attempt = self.attempt(space, donor, expected, request, &mut within, &mut fresh);
            let error = match attempt {
                Ok(answered) => {
                    self.silence = None;
                    return Ok(answered);
                }
                Err(Attempt::Final(error)) => return Err(error),
                Err(Attempt::Again(error)) => error,
            };
            self.open = None;
            debug!(donor = donor.name, %error, "control connection lost");
            let patience = space.config().patience;
            let silence = Silence::goes_on(self.silence, began, Instant::now(), patience);
            self.silence = Some(silence);
            let silent = silence.latest - silence.since;
            let spent = match persistence {
                Persistence::Once => fresh > 0,
                Persistence::Brief => fresh > 0 || within.is_over(),
                Persistence::Patient => fresh > 0 && silent >= patience,
            };
            if spent {
                if persistence != Persistence::Brief {
                    space.map().silent(donor.index);
                }
                return Err(SpaceError::Unreachable {
                    donor: donor.name.clone(),
                    patience: silent,
                });
            }
            if fresh > 0 {
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn attempt(
        &mut self,
        space: &Space,
        donor: &Donor,
        expected: Option<(u64, Place)>,
        (request, data): (Request<'_>, &[&[u8]]),
        within: &mut Within,
        fresh: &mut u32,
    ) -> Result<Answered, Attempt> {
        let Options { answer, .. } = space.config().connection;
        if self.open.is_none() {
            *fresh += 1;
            self.open = Some(introduce(space, donor, self.lane, within)?);
        }
        let Some(Open { connection, boot, begun }) = &mut self.open else {
            return Err(Attempt::Again(ConnectionError::Closed));
        };
        let (boot, begun) = (*boot, *begun);
        if let Some((segment, place)) = expected
            && place.boot != boot
        {
            if space.map().donor(donor.index).boot != Some(boot) {
                // Nobody has used the connection since the donor's life before.
                return Err(Attempt::Again(ConnectionError::Closed));
            }
            return Err(Attempt::Final(space.lost_error(segment, donor.index)));
        }
        if connection.lacks(&request) {
            let version = connection.welcome().map_or(0, |welcome| welcome.version);
            if version >= OWNERS_SINCE {
                let refusal = Refusal::Version(version, version);
                return Ok(Answered { outcome: Outcome::Refused(refusal), boot });
            }
            // A donor of an older version knows no owners, so it does not need the request.
            return Ok(Answered { outcome: Outcome::Done, boot });
        }
        let patience = &mut Patience::new(answer);
        let outcome = connection.call_within(within.or(patience), request, data)?;
        if !space.map().heard(donor.index, boot, connection.load(), begun, space.now()) {
            // An answer from an earlier life of the donor.
            return Err(Attempt::Again(ConnectionError::Closed));
        }
        if let Outcome::Refused(Refusal::StaleEpoch(_)) = outcome {
            return Err(Attempt::Final(space.fence()));
        }
        Ok(Answered { outcome, boot })
    }
}

/// How long a call may take in all, if that is less than a connection's own limits.
struct Within(Option<Patience>);

impl Within {
    fn or<'a>(&'a mut self, other: &'a mut Patience) -> &'a mut Patience {
        self.0.as_mut().unwrap_or(other)
    }

    fn is_over(&self) -> bool {
        self.0.as_ref().is_some_and(Patience::is_over)
    }
}

/// Why an attempt brought no answer.
enum Attempt {
    Again(ConnectionError),
    Final(SpaceError),
}

impl From<ConnectionError> for Attempt {
    fn from(error: ConnectionError) -> Attempt {
        Attempt::Again(error)
    }
}

/// Opens the control connection: raises the donor's fence to this borrower's epoch, so that an
/// earlier borrower is refused from here on, and learns what the donor already holds.
fn introduce(
    space: &Space,
    donor: &Donor,
    lane: u64,
    within: &mut Within,
) -> Result<Open, Attempt> {
    let begun = space.now();
    let hello = space.hello(lane);
    let options = space.config().connection;
    let to = donor.destination(space.config().credentials.as_ref());
    let patience = &mut Patience::new(options.connect);
    let opened = Connection::open_within(within.or(patience), to, &hello, &options);
    let mut connection = match opened {
        Err(ConnectionError::Refused(Refusal::StaleEpoch(_))) => {
            return Err(Attempt::Final(space.fence()));
        }
        Err(ConnectionError::Refused(refusal @ (Refusal::Version(..) | Refusal::OtherNode))) => {
            space.map().silent(donor.index);
            return Err(Attempt::Final(SpaceError::Refused { donor: donor.name.clone(), refusal }));
        }
        opened => opened?,
    };
    let Some(boot) = connection.welcome().map(|welcome| welcome.boot) else {
        return Err(Attempt::Again(ConnectionError::Closed));
    };
    let mut ask = |connection: &mut Connection, request| {
        connection.call_within(within.or(&mut Patience::new(options.answer)), request, &[])
    };
    match ask(&mut connection, Request::Fence)? {
        Outcome::Done => {}
        Outcome::Refused(Refusal::StaleEpoch(_)) => return Err(Attempt::Final(space.fence())),
        Outcome::Refused(refusal) => {
            return Err(Attempt::Final(SpaceError::Refused { donor: donor.name.clone(), refusal }));
        }
        _ => return Err(Attempt::Again(ConnectionError::Closed)),
    }
    let mut held = Vec::new();
    let to_list = space.is_adopted() && !space.map().is_listed(donor.index, boot);
    if to_list {
        let mut from = ExtentId(0);
        loop {
            let Outcome::Held(lines) = ask(&mut connection, Request::List { from })? else {
                return Err(Attempt::Again(ConnectionError::Closed));
            };
            held.extend_from_slice(&lines);
            match lines.last() {
                Some(last) if lines.len() == MAX_HELD => from = ExtentId(last.extent.0 + 1),
                _ => break,
            }
        }
        info!(donor = donor.name, extents = held.len(), "learnt what the donor holds");
    }
    let mut map = space.map();
    if !map.heard(donor.index, boot, connection.load(), begun, space.now()) {
        return Err(Attempt::Again(ConnectionError::Closed));
    }
    if to_list {
        map.listed(donor.index, boot, &held);
    }
    drop(map);
    Ok(Open { connection, boot, begun })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Directory, DonorAddress, Site, SpaceConfig};
    use hecaton_donor::{Donor as Lender, DonorConfig, listen};
    use hecaton_memory::{Epoch, Size, SpaceId};
    use hecaton_transport::protocol::{Hello, OWNERS_SINCE};

    struct One(SocketAddr);

    impl Directory for One {
        fn donors(&self) -> Vec<DonorAddress> {
            vec![DonorAddress { name: "d".into(), site: Site::unplaced("d"), addr: self.0 }]
        }
    }

    #[test]
    fn a_donor_that_knows_no_owners_is_not_told_whom_to_admit() {
        let config = DonorConfig::new("d", ([127, 0, 0, 1], 0).into(), Size(1 << 20));
        let lender = Lender::open(&config, None).unwrap();
        let serving = lender.serve(listen(config.listen).unwrap()).unwrap();
        let address = serving.address();
        let config = SpaceConfig::new(SpaceId(1), Epoch(1), "test", 64);
        let space = Space::create(config, Arc::new(One(address))).unwrap();
        let donor = space.donor(DonorIndex(0));
        let mut link = donor.link();
        let version = |link: &Link| {
            let open = link.open.as_ref().expect("it is open");
            open.connection.welcome().expect("it is open").version
        };
        let admit = |link: &mut Link| {
            let admit = Request::Admit { node: "n" };
            link.call(&space, &donor, None, admit, Persistence::Once).unwrap().outcome
        };
        let newest = space.hello(1).versions.1;
        assert_eq!((admit(&mut link), version(&link)), (Outcome::Done, newest));
        let hello = Hello { versions: (OWNERS_SINCE - 1, OWNERS_SINCE - 1), ..space.hello(1) };
        let connection = Connection::open(address, &hello, &Options::default()).unwrap();
        let boot = connection.welcome().unwrap().boot;
        link.open = Some(Open { connection, boot, begun: space.now() });
        // A donor that is asked what it does not know ends the connection, and this would be on
        // another.
        assert_eq!((admit(&mut link), version(&link)), (Outcome::Done, OWNERS_SINCE - 1));
    }

    #[test]
    fn callers_wait_for_a_silent_donor_together() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let patience = Duration::from_secs(60);
        let first = Silence::goes_on(None, at(0), at(1), patience);
        assert_eq!(first, Silence { since: at(0), latest: at(1) });
        let spent = Silence::goes_on(Some(first), at(0), at(60), patience);
        assert_eq!(spent, Silence { since: at(0), latest: at(60) });
        // The next in turn, which fails at once.
        let next = Silence::goes_on(Some(spent), at(60), at(61), patience);
        assert_eq!(next, Silence { since: at(0), latest: at(61) });
        // Nobody asked for a long time, in which it may have been there.
        let other = Silence::goes_on(Some(next), at(122), at(123), patience);
        assert_eq!(other, Silence { since: at(122), latest: at(123) });
    }
}
