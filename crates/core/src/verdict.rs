//! What a call that ends an attempt means when its lease is not the live one: the rows of the end-of-attempt table below "running under its live lease",
//! which the verbs decide by deleting the running row.

/// The call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// The work is done.
    Complete,
    /// The work failed.
    Fail,
    /// The task is given back.
    Release,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// By its own call, as completed.
    Completed,
    /// By its own call, as failed.
    Failed,
    /// By its own call, after the task was cancelled.
    Cancelled,
    /// It was given back, for another or for later.
    Released,
    /// It gave its lease up to await an event.
    Awaiting,
    /// Its lease ran out and was swept.
    Lapsed,
}

impl Ended {
    /// Reads the word that `stint.task_attempts` keeps.
    pub fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "completed" => Ended::Completed,
            "failed" => Ended::Failed,
            "cancelled" => Ended::Cancelled,
            "released" | "snoozed" => Ended::Released,
            "awaiting" => Ended::Awaiting,
            "lapsed" => Ended::Lapsed,
            _ => return None,
        })
    }

    /// Whether the attempt's own callback has come, and with it its usage.
    fn reported(self) -> bool {
        matches!(self, Ended::Completed | Ended::Failed | Ended::Cancelled)
    }
}

/// Where the task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Waiting in ready, scheduled or blocked; `last` is the number of its last attempt.
    Waiting {
        /// The number of its last attempt.
        last: i32,
    },
    /// Running under another lease.
    Running,
    /// Finished; `here` says whether this very lease finished it.
    Finished {
        /// Whether this lease is the one that finished it.
        here: bool,
    },
}

/// What the call comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The work is done although the lease had lapsed, or was given up to await an event: the task leaves the queue as completed.
    Accept,
    /// Another attempt has taken over, or the queue refuses late results.
    Superseded,
    /// This lease completed the task before: the stored result.
    AlreadyCompleted,
    /// This lease failed the attempt before.
    AlreadyFailed,
    /// The task was finished otherwise.
    AlreadyFinished,
    /// The lease was never granted here.
    UnknownLease,
}

/// Decides a call. `attempt` is the ended attempt that the lease named, if it ever named one. The second value says whether the usage the call reports is to
/// be kept: an attempt's tokens were spent whatever became of it, and are counted once.
pub fn late_call(call: Call, place: Place, attempt: Option<(i32, Ended)>, accept_late: bool) -> (Verdict, bool) {
    let usage = attempt.is_some_and(|(_, ended)| !ended.reported());
    let verdict = match (place, attempt) {
        (Place::Finished { here: true }, Some((_, Ended::Failed))) => Verdict::AlreadyFailed,
        (Place::Finished { here: true }, Some((_, Ended::Cancelled))) => Verdict::AlreadyFinished,
        (Place::Finished { here: true }, _) => Verdict::AlreadyCompleted,
        (Place::Finished { here: false }, _) => Verdict::AlreadyFinished,
        (_, None) => Verdict::UnknownLease,
        (Place::Waiting { last }, Some((number, Ended::Failed))) if number == last => Verdict::AlreadyFailed,
        (Place::Waiting { last }, Some((number, Ended::Lapsed | Ended::Awaiting))) if number == last && call == Call::Complete && accept_late => {
            Verdict::Accept
        }
        _ => Verdict::Superseded,
    };
    (verdict, usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAPSED: Option<(i32, Ended)> = Some((2, Ended::Lapsed));

    #[test]
    fn the_last_lapsed_lease_may_complete_but_not_fail_a_waiting_task() {
        let waiting = Place::Waiting { last: 2 };
        assert_eq!(late_call(Call::Complete, waiting, LAPSED, true), (Verdict::Accept, true));
        assert_eq!(late_call(Call::Fail, waiting, LAPSED, true), (Verdict::Superseded, true));
        assert_eq!(late_call(Call::Release, waiting, LAPSED, true), (Verdict::Superseded, true));
    }

    #[test]
    fn who_gave_its_lease_up_to_await_an_event_may_complete_but_not_fail_the_task() {
        let awaiting = Some((2, Ended::Awaiting));
        assert_eq!(late_call(Call::Complete, Place::Waiting { last: 2 }, awaiting, true), (Verdict::Accept, true));
        for call in [Call::Fail, Call::Release] {
            assert_eq!(late_call(call, Place::Waiting { last: 2 }, awaiting, true), (Verdict::Superseded, true));
        }
        assert_eq!(late_call(Call::Complete, Place::Running, awaiting, true), (Verdict::Superseded, true));
    }

    #[test]
    fn a_queue_may_refuse_late_results() {
        assert_eq!(late_call(Call::Complete, Place::Waiting { last: 2 }, LAPSED, false), (Verdict::Superseded, true));
    }

    #[test]
    fn an_older_lease_is_superseded_and_its_usage_kept() {
        assert_eq!(late_call(Call::Complete, Place::Waiting { last: 3 }, LAPSED, true), (Verdict::Superseded, true));
        assert_eq!(late_call(Call::Complete, Place::Running, LAPSED, true), (Verdict::Superseded, true));
        assert_eq!(late_call(Call::Fail, Place::Running, LAPSED, true), (Verdict::Superseded, true));
    }

    #[test]
    fn a_repeated_call_is_told_what_the_first_one_did_and_counts_no_usage_twice() {
        let here = Place::Finished { here: true };
        assert_eq!(late_call(Call::Complete, here, Some((1, Ended::Completed)), true), (Verdict::AlreadyCompleted, false));
        assert_eq!(late_call(Call::Fail, here, Some((1, Ended::Completed)), true), (Verdict::AlreadyCompleted, false));
        assert_eq!(late_call(Call::Fail, here, Some((1, Ended::Failed)), true), (Verdict::AlreadyFailed, false));
        assert_eq!(late_call(Call::Complete, here, Some((1, Ended::Failed)), true), (Verdict::AlreadyFailed, false));
        assert_eq!(late_call(Call::Fail, Place::Waiting { last: 1 }, Some((1, Ended::Failed)), true), (Verdict::AlreadyFailed, false));
    }

    #[test]
    fn a_late_completion_repeated_is_already_completed() {
        assert_eq!(late_call(Call::Complete, Place::Finished { here: true }, LAPSED, true), (Verdict::AlreadyCompleted, true));
    }

    #[test]
    fn a_task_finished_otherwise_answers_every_lease() {
        let elsewhere = Place::Finished { here: false };
        assert_eq!(late_call(Call::Complete, elsewhere, LAPSED, true), (Verdict::AlreadyFinished, true));
        assert_eq!(late_call(Call::Complete, elsewhere, None, true), (Verdict::AlreadyFinished, false));
    }

    #[test]
    fn a_lease_never_granted_changes_nothing() {
        for place in [Place::Running, Place::Waiting { last: 1 }] {
            for call in [Call::Complete, Call::Fail, Call::Release] {
                assert_eq!(late_call(call, place, None, true), (Verdict::UnknownLease, false));
            }
        }
    }

    #[test]
    fn a_task_given_back_cannot_be_completed_by_who_gave_it_back() {
        assert_eq!(late_call(Call::Complete, Place::Waiting { last: 1 }, Some((1, Ended::Released)), true), (Verdict::Superseded, true));
    }
}
