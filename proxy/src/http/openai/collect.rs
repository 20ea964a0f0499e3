//! A whole reply out of a request's steps.

use baton_schemas::EngineError;
use baton_schemas::openai::chat_response::{ChatCompletion, Choice, ReplyMessage, finish_reason};
use baton_schemas::openai::logprobs::ChoiceLogprobs;
use futures::StreamExt;

use super::ReplyShape;
use super::tally::Tally;
use crate::error::RequestError;
use crate::generate::Event;
use crate::http::steps::{Step, Steps};

/// Waits for all of a request; returns its route beside the reply. Dropping the future cancels the request.
pub(super) async fn collect(mut steps: Steps, shape: ReplyShape) -> Result<(String, ChatCompletion), RequestError> {
    let mut choices: Vec<Choice> = (0..shape.n).map(|index| unfinished(index, shape.logprobs)).collect();
    let mut tally = Tally::default();
    let mut chosen_route = String::new();
    while let Some(step) = steps.next().await {
        let step = step?;
        tally.record(&step);
        match step {
            Step::Accepted { route, .. } => chosen_route = route,
            Step::Event(Event::Started { .. } | Event::Handoff { .. }) => {}
            Step::Event(Event::Text { choice, text, tokens }) => {
                let choice = at(&mut choices, choice)?;
                choice.message.content.push_str(&text);
                if let (Some(all), Some(new)) = (&mut choice.logprobs, shape.logprobs_of(&tokens)) {
                    all.content.extend(new.content);
                }
            }
            // Steps end only after every choice has been here.
            Step::Event(Event::Finished { choice, reason, .. }) => {
                at(&mut choices, choice)?.finish_reason = finish_reason(reason);
            }
        }
    }
    let completion = ChatCompletion { head: shape.head, choices, usage: tally.usage(), timings: tally.timings() };
    Ok((chosen_route, completion))
}

fn unfinished(index: u32, logprobs: bool) -> Choice {
    Choice {
        index,
        message: ReplyMessage::new(String::new()),
        logprobs: logprobs.then(ChoiceLogprobs::default),
        finish_reason: "",
    }
}

fn at(choices: &mut [Choice], index: u32) -> Result<&mut Choice, RequestError> {
    let choice = choices.get_mut(index as usize);
    choice.ok_or_else(|| {
        EngineError::internal(format_args!("an event of choice {index}, which was not asked for")).into()
    })
}
