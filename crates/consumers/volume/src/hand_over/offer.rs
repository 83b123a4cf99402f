//! The process that serves a volume offers it to another node.

use super::stream::Stream;
use super::{Answer, Ask, Given, HandOverError, Heir, PATIENCE, VERSION, tables};
use crate::volume::Volume;
use hecaton_space::Heritage;
use serde::{Deserialize, Serialize};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

/// Between two looks at who connects, and at whose the volume is.
const LOOK: Duration = Duration::from_millis(100);

/// Between two rounds in which donors are asked whose it is.
const ROUND: Duration = Duration::from_secs(1);

/// How long the heir may take to serve the volume, before that is seen by the donors alone.
const UNTIL_SERVED: Duration = Duration::from_secs(60);

/// How many times as long as its lease a donor that still has some of a volume, and knows nothing
/// of the heir, is waited for when others know it. The heir does not count on such a one any more.
const LEASES: u32 = 10;

/// Which node may have a volume, and where it gets it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The node.
    pub to: String,
    /// Where it is to connect; with port 0 at a free one.
    pub address: SocketAddr,
}

/// A volume that is offered.
pub struct Offering {
    offer: Offer,
    volume: Arc<Volume>,
    /// Nothing is given any more. Held while it is decided.
    is_withdrawn: Mutex<bool>,
    is_taken: AtomicBool,
    /// Since when it has been the heir's at some donors, and not at all.
    passing_since: Mutex<Option<Instant>>,
}

/// The other node may have the tables.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("node `{0}` has been given its tables, and nobody else can attach it now")]
pub struct IsGiven(pub String);

impl Offering {
    /// Offers a volume, which nobody is attached to. All that was written is with donors then.
    pub fn begin(volume: &Arc<Volume>, offer: Offer) -> Result<Arc<Offering>, String> {
        Self::listen(volume, offer, |_| None)
    }

    /// Goes on with the offer of a process before this one; at another port if its own is taken.
    pub fn resume(volume: &Arc<Volume>, offer: Offer) -> Result<Arc<Offering>, String> {
        Self::listen(volume, offer, |error| (error.kind() == io::ErrorKind::AddrInUse).then_some(0))
    }

    /// `or_at`: the port instead of one that cannot be had.
    fn listen(
        volume: &Arc<Volume>,
        mut offer: Offer,
        or_at: impl Fn(&io::Error) -> Option<u16>,
    ) -> Result<Arc<Offering>, String> {
        volume.check_unattached()?;
        volume.flush().map_err(|error| error.to_string())?;
        if !volume.is_settled() {
            return Err("a write waits for a donor that is away; try again when it is back".into());
        }
        let bound = TcpListener::bind(offer.address).or_else(|error| match or_at(&error) {
            Some(port) => TcpListener::bind((offer.address.ip(), port)),
            None => Err(error),
        });
        let listening = bound.and_then(|listener| {
            listener.set_nonblocking(true)?;
            offer.address = listener.local_addr()?;
            Ok(listener)
        });
        let listener =
            listening.map_err(|error| format!("cannot listen at {}: {error}", offer.address))?;
        let offering = Arc::new(Offering {
            offer,
            volume: Arc::clone(volume),
            is_withdrawn: Mutex::new(false),
            is_taken: AtomicBool::new(false),
            passing_since: Mutex::new(None),
        });
        let offered = Arc::clone(&offering);
        let thread = thread::Builder::new().name("hand-over".into());
        thread.spawn(move || offered.run(&listener)).map_err(|error| error.to_string())?;
        Ok(offering)
    }

    /// To whom, and where.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Offers it no more, as long as it was not given.
    pub fn withdraw(&self) -> Result<(), IsGiven> {
        let mut is_withdrawn = self.withdrawn();
        if self.volume.is_given() {
            return Err(IsGiven(self.offer.to.clone()));
        }
        *is_withdrawn = true;
        Ok(())
    }

    /// Whether the other node has taken it over, so that nothing is left to be done here.
    pub fn is_taken(&self) -> bool {
        self.is_taken.load(Acquire)
    }

    fn run(&self, listener: &TcpListener) {
        let mut asked_at = Instant::now();
        while !*self.withdrawn() && !self.is_taken() && !self.volume.is_over() {
            match listener.accept() {
                Ok((socket, from)) => match self.converse(socket) {
                    Ok(()) => {}
                    Err(error) => {
                        let volume = self.volume.name();
                        tracing::warn!(volume, %from, %error, "the volume is not handed over");
                    }
                },
                Err(_) => thread::sleep(LOOK),
            }
            if self.volume.is_given() && asked_at.elapsed() >= ROUND {
                self.look();
                asked_at = Instant::now();
            }
        }
        if self.volume.is_fenced() {
            self.is_taken.store(true, Release);
        }
    }

    /// Looks whose it is; donors that do not know the heir any more are told anew.
    fn look(&self) {
        let heritage = self.volume.space.bequeath(&self.offer.to);
        let mut since = self.passing_since.lock().expect("no thread panics with it");
        let is_taken = match heritage {
            Ok(Heritage::Passed) => true,
            Ok(Heritage::Passing) => {
                let most = self.volume.space.config().lease * LEASES;
                since.get_or_insert_with(Instant::now).elapsed() >= most
            }
            Ok(Heritage::Own) | Err(_) => {
                *since = None;
                false
            }
        };
        if is_taken {
            self.is_taken.store(true, Release);
        }
    }

    fn converse(&self, socket: TcpStream) -> Result<(), HandOverError> {
        socket.set_nonblocking(false)?;
        let tls_dir = self.volume.config().tls_dir.as_deref();
        let (ask, mut stream): (Ask, _) = Stream::accept(socket, tls_dir)?;
        let given = match self.decide(&ask, stream.peer.as_deref()) {
            Ok(given) => given,
            Err(reason) => {
                let volume = self.volume.name();
                tracing::info!(volume, node = ask.node, reason, "a node is refused the volume");
                return Ok(stream.say(&Answer::Refused(reason))?);
            }
        };
        let (state, encrypt) = (&self.volume.state, given.config.encrypt);
        let segments = tables::segments(state);
        stream.say(&Answer::Given(Box::new(given)))?;
        tables::send(state, &segments, encrypt, &mut stream)?;
        let begun = Instant::now();
        stream.wait_for(ROUND)?;
        while begun.elapsed() < UNTIL_SERVED {
            match stream.hear() {
                Ok(Heir::Serves) => break,
                Err(HandOverError::Io(error))
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                    ) => {}
                Err(error) => return Err(error),
            }
            // Donors that are started again meanwhile are to know the heir.
            self.look();
        }
        stream.wait_for(PATIENCE)?;
        self.look();
        Ok(())
    }

    /// Whether who asks is given it, or why not.
    fn decide(&self, ask: &Ask, certified: Option<&str>) -> Result<Given, String> {
        let Ask { version, volume, node } = ask;
        let (own, heir) = (self.volume.name(), &self.offer.to);
        let node = certified.unwrap_or(node);
        if *version != VERSION {
            return Err(format!("it speaks version {VERSION} of the hand-over, and not {version}"));
        }
        if volume != own {
            return Err(format!("here is the volume `{own}`, and not `{volume}`"));
        }
        if node != heir {
            return Err(format!("it is detached for node `{heir}`, and not for `{node}`"));
        }
        let space = &self.volume.space;
        match space
            .bequeath(heir)
            .map_err(|error| format!("not all donors can be told: {error}"))?
        {
            Heritage::Own => {}
            Heritage::Passing | Heritage::Passed => {
                return Err(format!("node `{heir}` has it already"));
            }
        }
        let is_withdrawn = self.withdrawn();
        if *is_withdrawn {
            return Err("it is not detached any more".to_owned());
        }
        let state = &self.volume.state;
        let epoch = state.give().ok_or("it has been handed over too often")?;
        let segments = tables::segments(state).len() as u64;
        let config = self.volume.config().clone();
        Ok(Given { config, pages: state.pages(), epoch: epoch.0, segments })
    }

    fn withdrawn(&self) -> MutexGuard<'_, bool> {
        self.is_withdrawn.lock().expect("no thread panics with it")
    }
}
