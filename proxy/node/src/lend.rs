//! A worker's child: lends devices for one session. [`baton_engines::workers::child`] does it.

use baton_engines::workers::child::{self, Lent};
use baton_process::parent;
use baton_proxy::log_queue;
use baton_schemas::node::ChildEvent;
use baton_schemas::worker::LentDevice;
use rustix::process::Signal;

/// What would be lent. If there is nothing, the parent is told why and prints it, and this process ends.
pub fn describe(lent: &Lent) -> Vec<LentDevice> {
    child::describe(lent).unwrap_or_else(|error| {
        tell_parent(&error);
        log_queue::exit(1)
    })
}

/// Lends until the process ends.
pub fn run(lent: &Lent) -> ! {
    // The parent has written all that it writes.
    if let Err(error) = child::run(lent, || parent::tie_to(Signal::KILL)) {
        tell_parent(&error);
    }
    // ggml's thread still runs: an orderly end would free what it uses.
    parent::end_at_once()
}

fn tell_parent(error: &child::ChildError) {
    let summary = "the devices cannot be lent".into();
    parent::tell(&ChildEvent::Failed { message: error.to_string(), summary });
}
