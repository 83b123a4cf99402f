//! The process that has a volume shares it with other nodes' processes, which read it.

use super::{Answer, Granted, Join, Joined, MAX_READERS, MAX_SEGMENTS, VERSION, Wish};
use crate::hand_over::{HandOverError, stream::Stream, tables};
use crate::volume::Volume;
use hecaton_space::{MemberAt, SegmentAt};
use rustix::net::{Shutdown, shutdown};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

/// After that a reader is not heard any more.
const SILENCE: Duration = Duration::from_secs(10);

/// Donors are told of the readers at least so often: one that was started again has forgotten them.
const ADMISSION: Duration = Duration::from_secs(5);

/// Between two looks whether the last lease has run out.
const LOOK: Duration = Duration::from_millis(50);

/// After a failure to accept.
const PAUSE: Duration = Duration::from_millis(100);

/// A volume that is shared.
pub struct Sharing {
    volume: Arc<Volume>,
    listener: TcpListener,
    is_over: AtomicBool,
    connections: Mutex<Connections>,
    /// Donors are to be told of readers.
    is_news: Mutex<bool>,
    news: Condvar,
}

#[derive(Default)]
struct Connections {
    last: u64,
    open: HashMap<u64, TcpStream>,
}

impl Sharing {
    /// Shares a volume at a socket that listens. `is_new`: it was not shared before, so that what
    /// readers had of it until then is not to be trusted.
    pub fn begin(
        volume: &Arc<Volume>,
        socket: OwnedFd,
        is_new: bool,
    ) -> Result<Arc<Sharing>, String> {
        if let Some(reason) = volume.config().why_not_shared() {
            return Err(reason);
        }
        let sharing = Arc::new(Sharing {
            volume: Arc::clone(volume),
            listener: TcpListener::from(socket),
            is_over: AtomicBool::new(false),
            connections: Mutex::default(),
            is_news: Mutex::new(false),
            news: Condvar::new(),
        });
        volume.attachments.share(is_new);
        let (accepting, admitting) = (Arc::clone(&sharing), Arc::clone(&sharing));
        let accept = thread::Builder::new().name("readers".into());
        let admit = thread::Builder::new().name("admission".into());
        accept
            .spawn(move || accepting.accept())
            .and_then(|_| admit.spawn(move || admitting.admit()))
            .map_err(|error| error.to_string())?;
        Ok(sharing)
    }

    /// Shares it no more, and returns when nobody reads it any more. Refused while nodes are
    /// attached, unless it is forced: then their leases are waited for.
    pub fn end(&self, force: bool) -> Result<(), String> {
        if let Err(nodes) = self.volume.attachments.unshare(force) {
            let nodes: Vec<_> = nodes.iter().map(|node| format!("node `{node}`")).collect();
            let verb = if nodes.len() == 1 { "is" } else { "are" };
            return Err(format!("{} {verb} attached to it", nodes.join(", ")));
        }
        self.stop();
        while self.volume.attachments.is_leased(&self.volume.state) {
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Takes and hears nobody any more.
    pub fn stop(&self) {
        self.is_over.store(true, Release);
        // Wakes who accepts.
        let _ = shutdown(&self.listener, Shutdown::Both);
        for stream in self.connections().open.values() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        self.tell_donors();
    }

    fn accept(self: &Arc<Self>) {
        while !self.is_over() {
            let (socket, from) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(_) if self.is_over() => return,
                Err(error) => {
                    tracing::warn!(volume = self.volume.name(), %error, "a reader cannot be taken");
                    thread::sleep(PAUSE);
                    continue;
                }
            };
            let Some(number) = self.enter(&socket) else {
                tracing::warn!(volume = self.volume.name(), %from, "a reader too many");
                continue;
            };
            let sharing = Arc::clone(self);
            let heard = thread::Builder::new().name("reader".into()).spawn(move || {
                if let Err(error) = sharing.converse(socket) {
                    let volume = sharing.volume.name();
                    tracing::debug!(volume, %from, %error, "a reader is heard no more");
                }
                sharing.connections().open.remove(&number);
            });
            if heard.is_err() {
                self.connections().open.remove(&number);
            }
        }
    }

    /// None if there are too many.
    fn enter(&self, socket: &TcpStream) -> Option<u64> {
        let socket = socket.try_clone().ok()?;
        let mut connections = self.connections();
        // As many again, of readers that come back before their last connection has ended.
        if self.is_over() || connections.open.len() >= 2 * MAX_READERS {
            return None;
        }
        connections.last += 1;
        let number = connections.last;
        connections.open.insert(number, socket);
        Some(number)
    }

    fn converse(&self, socket: TcpStream) -> Result<(), HandOverError> {
        let tls_dir = self.volume.config().tls_dir.as_deref();
        let (join, mut stream): (Join, _) = Stream::accept(socket, tls_dir)?;
        if let Some(reason) = self.why_not(&join, stream.peer.as_deref()) {
            return Ok(stream.say(&Joined::Refused(reason))?);
        }
        let node = stream.peer.clone().unwrap_or(join.node);
        let volume = &self.volume;
        let config = Box::new(volume.config().clone());
        stream.say(&Joined::Volume(config, volume.state.pages()))?;
        stream.wait_for(SILENCE)?;
        let mut told = Told::default();
        while !self.is_over() {
            match stream.hear()? {
                Wish::Lease => match self.grant(join.session, &node) {
                    Ok((edition, is_new)) => {
                        let granted = told.granted(volume, edition);
                        if is_new || !granted.segments.is_empty() {
                            self.tell_donors();
                        }
                        stream.say(&Answer::Granted(Box::new(granted)))?;
                    }
                    Err(reason) => stream.say(&Answer::Refused(reason))?,
                },
                // A write meanwhile changes the edition.
                Wish::Tables => {
                    let (state, encrypt) = (&volume.state, volume.config().encrypt);
                    let segments = tables::segments(state);
                    let count = segments.len() as u64;
                    stream.say(&Answer::Tables { pages: state.pages(), segments: count })?;
                    tables::send(state, &segments, encrypt, &mut stream)?;
                }
                Wish::Leave => {
                    volume.attachments.leave(join.session, &volume.state);
                    break;
                }
            }
        }
        Ok(())
    }

    fn why_not(&self, join: &Join, certified: Option<&str>) -> Option<String> {
        let volume = &self.volume;
        let config = volume.config();
        if join.version != VERSION {
            return Some(format!("it speaks version {VERSION}, and not {}", join.version));
        }
        if join.volume != config.name {
            return Some(format!(
                "here is the volume `{}`, and not `{}`",
                config.name, join.volume
            ));
        }
        if join.space.is_some_and(|space| space != config.space) {
            return Some(format!("the volume `{}` is another one by now", config.name));
        }
        let is_open = config.encrypt && certified.is_none();
        is_open.then(|| "it is encrypted, and its key goes to other nodes by TLS only".to_owned())
    }

    /// A lease: of which edition, and whether there was none before.
    fn grant(&self, session: u64, node: &str) -> Result<(u64, bool), String> {
        let volume = &self.volume;
        if volume.is_over() {
            return Err("it is served no longer".to_owned());
        }
        let attachments = &volume.attachments;
        let (edition, is_new) = attachments.lease(session, node, &volume.state)?;
        if is_new && let Err(reason) = volume.come_to_rest() {
            attachments.leave(session, &volume.state);
            return Err(reason);
        }
        Ok((edition, is_new))
    }

    /// Tells donors of the readers, now and then. Not as leases are renewed, for a donor that is
    /// away takes its time.
    fn admit(&self) {
        while !self.is_over() {
            let nodes = self.volume.attachments.reading_nodes();
            if !nodes.is_empty() {
                let untold = self.volume.space.let_read(&nodes);
                if untold > 0 {
                    tracing::debug!(volume = self.volume.name(), untold, "donors know no readers");
                }
            }
            let is_news = self.is_news.lock().expect("no thread panics with it");
            let waited = self.news.wait_timeout_while(is_news, ADMISSION, |is_news| !*is_news);
            *waited.expect("no thread panics with it").0 = false;
        }
    }

    fn tell_donors(&self) {
        *self.is_news.lock().expect("no thread panics with it") = true;
        self.news.notify_all();
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Acquire)
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().expect("no thread panics with them")
    }
}

/// Locations of segments that a reader was told.
#[derive(Default)]
struct Told {
    /// All of it, as of that number of changes.
    as_of: Option<u64>,
    segments: BTreeMap<u64, Vec<MemberAt>>,
}

impl Told {
    fn granted(&mut self, volume: &Volume, edition: u64) -> Granted {
        let space = &volume.space;
        let epoch = space.config().epoch.0;
        if self.as_of == Some(space.changes()) {
            let (segments, donors) = (Vec::new(), Vec::new());
            return Granted { epoch, edition, segments, donors, has_more: false };
        }
        let (changes, now_at) = space.segments_at();
        let (news, has_more) = self.news(&now_at);
        self.as_of = (!has_more).then_some(changes);
        let named: BTreeSet<&str> =
            news.iter().flat_map(|at| &at.members).map(|member| member.donor.as_str()).collect();
        let mut donors = space.donor_addresses();
        donors.retain(|donor| named.contains(donor.name.as_str()));
        Granted { epoch, edition, segments: news, donors, has_more }
    }

    /// The changed locations, at most [`MAX_SEGMENTS`], and whether there are more.
    fn news(&mut self, now_at: &BTreeMap<u64, Vec<MemberAt>>) -> (Vec<SegmentAt>, bool) {
        let nowhere = Vec::new();
        let gone = self.segments.keys().filter(|segment| !now_at.contains_key(segment));
        let gone = gone.map(|segment| (*segment, &nowhere));
        let moved = now_at.iter().map(|(segment, members)| (*segment, members));
        let moved = moved.filter(|(segment, members)| self.segments.get(segment) != Some(*members));
        let mut news = gone.chain(moved);
        let told: Vec<SegmentAt> = news
            .by_ref()
            .take(MAX_SEGMENTS)
            .map(|(segment, members)| SegmentAt { segment, members: members.clone() })
            .collect();
        let has_more = news.next().is_some();
        for SegmentAt { segment, members } in &told {
            match now_at.contains_key(segment) {
                true => self.segments.insert(*segment, members.clone()),
                false => self.segments.remove(segment),
            };
        }
        (told, has_more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn members(boots: &[u64]) -> Vec<MemberAt> {
        boots.iter().map(|boot| MemberAt { donor: "d".into(), boot: *boot, extent: 0 }).collect()
    }

    proptest! {
        #[test]
        fn a_reader_is_told_of_all_that_moves(
            times in prop::collection::vec(
                prop::collection::btree_map(0u64..200, prop::collection::vec(0u64..3, 1..3), 0..200), 1..6,
            ),
        ) {
            let (mut told, mut known) = (Told::default(), BTreeMap::new());
            for time in times {
                let now_at: BTreeMap<u64, Vec<MemberAt>> =
                    time.iter().map(|(segment, boots)| (*segment, members(boots))).collect();
                loop {
                    let (news, has_more) = told.news(&now_at);
                    prop_assert!(news.len() <= MAX_SEGMENTS && (!has_more || news.len() == MAX_SEGMENTS));
                    for SegmentAt { segment, members } in news {
                        match members.is_empty() {
                            true => known.remove(&segment),
                            false => known.insert(segment, members),
                        };
                    }
                    if !has_more {
                        break;
                    }
                }
                prop_assert_eq!(&known, &now_at);
            }
        }
    }
}
