//! The process of another node: it joins the one that has the volume, and does as that one says.

use super::{ANSWER, Answer, Granted, Join, Joined, RENEWAL, SharedBy, VERSION, Wish, now};
use crate::VolumeError;
use crate::hand_over::{HandOverError, stream::Stream, tables};
use crate::readers::Reading;
use crate::state::{MAX_PAGES, State, check};
use crate::volume::{Volume, VolumeConfig};
use hecaton_memory::{Epoch, SpaceId, random_u64};
use hecaton_pki::CredentialsDir;
use hecaton_space::{Directory, DonorAddress, Redundancy, Space, SpaceConfig};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long tables may stop on their way.
const TABLES: Duration = Duration::from_secs(20);

/// A volume that may be read here, as its owner describes it.
pub struct Described {
    /// As the other node has it.
    pub config: VolumeConfig,
    /// Its size.
    pub pages: u64,
}

/// The donors that the owner has named.
#[derive(Default)]
pub(crate) struct Named(Mutex<BTreeMap<String, DonorAddress>>);

impl Named {
    fn add(&self, donors: Vec<DonorAddress>) {
        let mut named = self.0.lock().expect("no thread panics with the donors");
        named.extend(donors.into_iter().map(|donor| (donor.name.clone(), donor)));
    }
}

impl Directory for Named {
    fn donors(&self) -> Vec<DonorAddress> {
        self.0.lock().expect("no thread panics with the donors").values().cloned().collect()
    }
}

/// A connection to the process that has the volume.
struct Joint {
    stream: Stream,
    from: SharedBy,
}

impl Joint {
    /// `space`: of a volume that is known already.
    fn open(
        (volume, space): (&str, Option<u64>),
        from: &SharedBy,
        (node, session): (&str, u64),
        tls_dir: Option<&Path>,
    ) -> Result<(Joint, Described), HandOverError> {
        let mut stream = Stream::connect(from.address, &from.node, tls_dir)?;
        stream.wait_for(ANSWER)?;
        let (volume, node) = (volume.to_owned(), node.to_owned());
        let join = Join { version: VERSION, volume: volume.clone(), space, node, session };
        stream.say(&join)?;
        let joint = |stream| Joint { stream, from: from.clone() };
        match stream.hear()? {
            Joined::Volume(config, pages) => {
                if config.name != volume || (config.encrypt && stream.peer.is_none()) {
                    return Err(HandOverError::Foreign(format!("it has `{}`", config.name)));
                }
                check(pages)?;
                Ok((joint(stream), Described { config: *config, pages }))
            }
            Joined::Refused(reason) => Err(joint(stream).refused(reason)),
        }
    }

    fn of(config: &VolumeConfig, from: &SharedBy, session: u64) -> Result<Joint, HandOverError> {
        let volume = (config.name.as_str(), Some(config.space));
        let who = (config.site.host.as_str(), session);
        Ok(Joint::open(volume, from, who, config.tls_dir.as_deref())?.0)
    }

    fn refused(&self, reason: String) -> HandOverError {
        HandOverError::Refused { holder: self.from.node.clone(), reason }
    }

    /// Asks for a lease. The time is that before it was asked for.
    fn lease(&mut self) -> Result<(Duration, Result<Granted, String>), HandOverError> {
        let asked_at = now();
        self.stream.say(&Wish::Lease)?;
        match self.stream.hear()? {
            Answer::Granted(granted) => Ok((asked_at, Ok(*granted))),
            Answer::Refused(reason) => Ok((asked_at, Err(reason))),
            Answer::Tables { .. } => Err(HandOverError::Foreign("tables".to_owned())),
        }
    }

    /// Returns when the owner has heard that its lease is not needed any more.
    fn leave(mut self) -> Result<(), HandOverError> {
        self.stream.say(&Wish::Leave)?;
        match self.stream.hear::<Answer>() {
            Err(HandOverError::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Err(HandOverError::Foreign("an answer to a farewell".to_owned())),
        }
    }

    /// Fetches tables of an edition, of which there is a lease: they are if there still is one when
    /// they are there.
    fn tables(&mut self, state: &State, encrypt: bool, edition: u64) -> Result<(), HandOverError> {
        state.set_edition(0);
        state.forget_all();
        self.stream.say(&Wish::Tables)?;
        let (pages, segments) = match self.stream.hear()? {
            Answer::Tables { pages, segments } => (pages, segments),
            Answer::Refused(reason) => return Err(self.refused(reason)),
            Answer::Granted(_) => return Err(HandOverError::Foreign("no tables".to_owned())),
        };
        check(pages)?;
        state.set_pages(pages);
        self.stream.wait_for(TABLES)?;
        tables::receive(state, segments, encrypt, &mut self.stream)?;
        self.stream.wait_for(ANSWER)?;
        match self.lease()?.1 {
            Ok(granted) if granted.edition == edition => {
                state.set_edition(edition);
                Ok(())
            }
            Ok(_) => Err(self.refused("somebody has written to it meanwhile".to_owned())),
            Err(reason) => Err(self.refused(reason)),
        }
    }
}

/// Asks node `from` to describe a volume that it shares, for this node (`node`) to read.
pub fn describe(
    volume: &str,
    from: &SharedBy,
    node: &str,
    tls_dir: Option<&Path>,
) -> Result<Described, HandOverError> {
    Ok(Joint::open((volume, None), from, (node, random_u64()), tls_dir)?.1)
}

/// Fetches the tables of a volume that is read here, if there are none of an earlier process.
pub fn fetch_tables(
    config: &VolumeConfig,
    from: &SharedBy,
    state: &State,
) -> Result<(), HandOverError> {
    if state.edition() != 0 {
        return Ok(());
    }
    let mut joint = Joint::of(config, from, random_u64())?;
    let granted = joint.lease()?.1.map_err(|reason| joint.refused(reason))?;
    joint.tables(state, config.encrypt, granted.edition)?;
    // The edition reveals every write from now on.
    joint.leave()
}

/// The space of a volume that is read here, and the donors that it is to know.
pub(crate) fn space_of(config: &VolumeConfig) -> Result<(Arc<Space>, Arc<Named>), VolumeError> {
    let named = Arc::new(Named::default());
    let mut space = SpaceConfig::new(SpaceId(config.space), Epoch(0), &config.name, MAX_PAGES);
    space.redundancy = Redundancy::of_copies(config.copies)?;
    space.site = config.site.clone();
    space.credentials = config.tls_dir.clone().map(CredentialsDir::new).map(Arc::new);
    space.lease = config.lease;
    space.failover = config.failover;
    space.give_up = config.donor_patience;
    // A short wait, so that a moved page is soon asked for at its new place.
    space.patience = space.patience.min(config.donor_patience).min(ANSWER);
    Ok((Space::of_another(space, Arc::<Named>::clone(&named))?, named))
}

/// Follows the volume's owner from now on, until the volume is over.
pub(crate) fn begin(volume: &Arc<Volume>, named: Arc<Named>) -> std::io::Result<()> {
    let volume = Arc::clone(volume);
    if let Some(reading) = &volume.reading {
        reading.set_followed(true);
    }
    let thread = std::thread::Builder::new().name("follow".into());
    thread.spawn(move || {
        let Some(reading) = &volume.reading else { return };
        while !volume.is_over() {
            match follow(&volume, reading, &named) {
                Ok(()) => {}
                Err(HandOverError::Refused { reason, .. }) => reading.refused(reason),
                Err(error) => {
                    let (volume, node) = (volume.name(), &reading.from.node);
                    tracing::debug!(volume, node, %error, "a node that shares a volume is not heard");
                }
            }
            reading.pause(RENEWAL);
        }
        reading.set_followed(false);
    })?;
    Ok(())
}

fn follow(volume: &Volume, reading: &Reading, named: &Named) -> Result<(), HandOverError> {
    let mut joint = Joint::of(volume.config(), &reading.from, reading.session)?;
    while !volume.is_over() {
        match joint.lease()? {
            (asked_at, Ok(granted)) => {
                let Granted { epoch, edition, segments, donors, has_more } = granted;
                if volume.space.set_epoch_of_another(Epoch(epoch)) {
                    volume.lanes.begin_anew();
                }
                named.add(donors);
                if !segments.is_empty() {
                    volume.space.place(&segments);
                }
                reading.granted(asked_at, edition, !has_more);
                if has_more {
                    continue;
                }
                if edition != reading.tables()
                    && replace_tables(volume, reading, &mut joint, edition)?
                {
                    continue;
                }
            }
            (_, Err(reason)) => reading.refused(reason),
        }
        reading.pause(RENEWAL);
    }
    // Nothing is answered any more.
    joint.leave()
}

/// Fetches tables anew, if nobody is attached who may have cached what is in the old ones. Whether
/// they are there.
fn replace_tables(
    volume: &Volume,
    reading: &Reading,
    joint: &mut Joint,
    edition: u64,
) -> Result<bool, HandOverError> {
    let _gate = reading.gate.lock().expect("no thread panics with it");
    if volume.check_unattached().is_err() {
        return Ok(false);
    }
    reading.set_tables(0);
    joint.tables(&volume.state, volume.config().encrypt, edition)?;
    volume.count_pages();
    reading.set_tables(edition);
    tracing::info!(volume = volume.name(), "what was written elsewhere is read from now on");
    Ok(true)
}
