"""What a store holds, for a person: which rollouts (`select`), a table of them (`listing`), one of them (`show`), counts (`stats`)."""
