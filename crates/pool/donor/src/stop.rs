//! Telling a donor to stop.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Tells whoever waits on it to stop, once and for all. Clones are the same one.
#[derive(Clone, Debug, Default)]
pub struct StopHandle(Arc<(Mutex<bool>, Condvar)>);

impl StopHandle {
    /// Tells to stop.
    pub fn stop(&self) {
        let (stopped, changed) = &*self.0;
        *stopped.lock().expect("no thread panics with the flag") = true;
        changed.notify_all();
    }

    /// Waits until told to stop.
    pub fn wait(&self) {
        while !self.wait_for(Duration::from_secs(3600)) {}
    }

    /// Waits until told to stop, or until the time is up. Says whether it was told.
    pub fn wait_for(&self, time: Duration) -> bool {
        let (stopped, changed) = &*self.0;
        let stopped = stopped.lock().expect("no thread panics with the flag");
        let waited = changed.wait_timeout_while(stopped, time, |stopped| !*stopped);
        *waited.expect("no thread panics with the flag").0
    }
}
