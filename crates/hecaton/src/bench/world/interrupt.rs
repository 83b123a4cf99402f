//! Ctrl-C as a flag that the benches look at while they wait.
//!
//! A bench may have a swap device, a mount and a cgroup in place when a person stops it. Dying by
//! the signal would leave them behind; with a flag, waiting ends with an error and everything is
//! taken down by the same destructors as on any other failure.

use anyhow::{Context as _, bail};
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::signal::unix::{SignalKind, signal};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Takes over SIGINT, SIGTERM and SIGHUP for the rest of the process.
pub(crate) fn watch() -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot watch for Ctrl-C")?;
    let (mut int, mut term, mut hup) = {
        let _entered = runtime.enter();
        (
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
            signal(SignalKind::hangup())?,
        )
    };
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        runtime.block_on(async {
            loop {
                tokio::select! {
                    _ = int.recv() => {}
                    _ = term.recv() => {}
                    _ = hup.recv() => {}
                }
                INTERRUPTED.store(true, Ordering::Relaxed);
            }
        });
    })?;
    Ok(())
}

/// An error once the bench has been asked to stop.
pub(crate) fn check() -> anyhow::Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) {
        bail!("stopped; everything that the bench had set up is taken down");
    }
    Ok(())
}
