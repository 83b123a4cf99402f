//! The node that is to have the volume fetches its tables.

use super::stream::Stream;
use super::{Answer, Ask, Given, HandOverError, Heir, TELLING, VERSION, tables};
use crate::state::State;
use crate::volume::VolumeConfig;
use hecaton_memory::Epoch;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// A volume that is this node's from now on.
pub struct Fetched {
    /// As the other node has it.
    pub config: VolumeConfig,
    /// Its size.
    pub pages: u64,
    state: State,
    stream: Stream,
}

/// Fetches what node `holder` offers at `from` to `node`, which is this one.
pub fn fetch(
    volume: &str,
    (holder, from): (&str, SocketAddr),
    node: &str,
    tls_dir: Option<&Path>,
) -> Result<Fetched, HandOverError> {
    let mut stream = Stream::connect(from, holder, tls_dir)?;
    let (volume, node) = (volume.to_owned(), node.to_owned());
    stream.say(&Ask { version: VERSION, volume: volume.clone(), node })?;
    stream.wait_for(TELLING)?;
    let given = match stream.hear()? {
        Answer::Given(given) => *given,
        Answer::Refused(reason) => {
            return Err(HandOverError::Refused { holder: holder.to_owned(), reason });
        }
    };
    let Given { config, pages, epoch, segments } = given;
    if config.name != volume || (config.encrypt && stream.peer.is_none()) {
        return Err(HandOverError::Foreign(format!("it gives `{}`", config.name)));
    }
    let state = State::create(pages)?;
    state.inherit(Epoch(epoch));
    tables::receive(&state, segments, config.encrypt, &mut stream)?;
    Ok(Fetched { config, pages, state, stream })
}

impl Fetched {
    /// The tables, for the process that is to serve it.
    pub fn tables(&self) -> std::io::Result<OwnedFd> {
        self.state.as_fd().try_clone_to_owned()
    }

    /// Tells the other node that the volume is served here. One that does not hear it finds out.
    pub fn is_served(mut self) {
        if let Err(error) = self.stream.say(&Heir::Serves) {
            tracing::debug!(%error, "the node before was not told that its volume is served");
        }
    }
}
